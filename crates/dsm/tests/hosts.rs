//! Jobs over two hosts, which are network namespaces of this machine with a cable between them.

mod harness;

use std::process::Command;
use std::time::Duration;

use byway_dsm::launch::{Hosts, JobEnd, Launch};
use byway_skip::{SkipReason, skip_this};

use harness::{WIRES, can_run, example, launch, run};

/// Two network namespaces, removed with this.
struct TwoHosts {
    names: [String; 2],
}

fn ip(arguments: &[&str]) -> bool {
    Command::new("ip").args(arguments).output().is_ok_and(|done| done.status.success())
}

impl TwoHosts {
    const ADDRESSES: [&str; 2] = ["10.213.77.1", "10.213.77.2"];

    /// Says so if this machine does not let the test make them.
    fn make() -> Option<Self> {
        if Command::new("ip").arg("-V").output().is_err() {
            skip_this(SkipReason::MissingTool("ip"));
            return None;
        }
        let name = |end| format!("byway-dsm-{}-{end}", std::process::id());
        let hosts = Self { names: [name("a"), name("b")] };
        let [first, second] = [hosts.names[0].as_str(), hosts.names[1].as_str()];
        let mut is_made = ip(&["netns", "add", first]) && ip(&["netns", "add", second]);
        is_made &= ip(&["-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second]);
        for (name, address) in hosts.names.iter().zip(Self::ADDRESSES) {
            is_made &= ip(&["-n", name, "address", "add", &format!("{address}/24"), "dev", "cable"]);
            is_made &= ip(&["-n", name, "link", "set", "cable", "up"]) && ip(&["-n", name, "link", "set", "lo", "up"]);
        }
        if !is_made {
            skip_this(SkipReason::Machine("network namespaces with a cable between them cannot be made"));
        }
        is_made.then_some(hosts)
    }

    /// A job of an example, which listens from this port on at each host.
    fn job(&self, ranks: usize, port: u16, name: &str, arguments: &[&str]) -> Launch {
        let host = |(name, address): (&String, &str)| (name.clone(), format!("{address}:{port}").parse().unwrap());
        let hosts = Hosts {
            hosts: self.names.iter().zip(Self::ADDRESSES).map(host).collect(),
            start: ["ip", "netns", "exec"].map(Into::into).to_vec(),
            agent: vec![example("agent").into()],
        };
        Launch { hosts: Some(hosts), ..launch(ranks, WIRES[2], name, arguments) }
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        for name in &self.names {
            ip(&["netns", "delete", name]);
        }
    }
}

fn two_hosts() -> Option<TwoHosts> {
    if can_run() { TwoHosts::make() } else { None }
}

#[test]
fn a_grid_is_relaxed_right_on_two_hosts() {
    let Some(hosts) = two_hosts() else { return };
    let (end, lines) = run(&hosts.job(4, 7000, "sor", &["100", "8"]));
    assert_eq!(end, JobEnd::Well, "{lines:?}");
    let right = "grid of 100 x 100 right after 8 steps on 4 processes";
    assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.starts_with(right)), "{lines:?}");
}

#[test]
fn processes_on_hosts_that_are_cut_off_from_each_other_end_by_name() {
    let Some(hosts) = two_hosts() else { return };
    let keep_alive = Duration::from_secs(2);
    // Long enough that it never ends by itself; each step is printed.
    let job = Launch { keep_alive, ..hosts.job(2, 7000, "trouble", &["steps"]) };
    let (mut lines, mut is_cut) = (Vec::new(), false);
    let end = job.start().unwrap().wait(|rank, _, line| {
        lines.push((rank, String::from_utf8_lossy(line).into_owned()));
        // Both hosts are in the midst.
        if !is_cut && lines.len() > 10 {
            assert!(ip(&["-n", &hosts.names[1], "link", "set", "cable", "down"]));
            is_cut = true;
        }
    });
    for (rank, other) in [(0, 1), (1, 0)] {
        let text = format!("rank {rank}: rank {other} has been silent for");
        assert!(lines.iter().any(|line| line.0 == rank && line.1.contains(&text)), "{end:?}: {lines:?}");
    }
    assert!(matches!(end, JobEnd::Failed { status, .. } if status.code() == Some(70)), "{end:?}");
}

#[test]
fn a_process_that_fails_on_another_host_ends_the_job_there_and_here() {
    let Some(hosts) = two_hosts() else { return };
    let (end, lines) = run(&hosts.job(2, 7000, "trouble", &["child"]));
    let JobEnd::Failed { rank: 1, status } = end else { panic!("{end:?}: {lines:?}") };
    assert_eq!(status.code(), Some(3), "{lines:?}");
    assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.contains("rank 1 has gone")), "{lines:?}");
}

#[test]
fn a_port_in_use_is_named() {
    let Some(hosts) = two_hosts() else { return };
    let mut job = hosts.job(2, 7000, "sor", &["100", "8"]);
    // Both processes on one host, at one address.
    if let Some(all) = &mut job.hosts {
        all.hosts[1] = all.hosts[0].clone();
    }
    let (end, lines) = run(&job);
    assert!(matches!(end, JobEnd::Failed { .. }), "{end:?}: {lines:?}");
    assert!(lines.iter().any(|(_, line)| line.contains("cannot listen at 10.213.77.1:7000")), "{lines:?}");
}
