//! Jobs over two hosts, which are network namespaces of this machine with a cable between them.

mod harness;

use std::process::Command;
use std::time::Duration;

use byway_dsm::launch::{HostLink, Hosts, JobEnd, Launch};
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
            link: HostLink::default(),
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
    for link in [HostLink::Tls, HostLink::Plain] {
        let mut job = hosts.job(4, 7000, "sor", &["100", "8"]);
        if let Some(all) = &mut job.hosts {
            all.link = link;
        }
        let (end, lines) = run(&job);
        assert_eq!(end, JobEnd::Well, "{link:?}: {lines:?}");
        let right = "grid of 100 x 100 right after 8 steps on 4 processes";
        assert!(lines.iter().any(|(rank, line)| *rank == 0 && line.starts_with(right)), "{link:?}: {lines:?}");
    }
}

/// As where the program on one host is linked with an older byway, or another job's process is at a port of this one.
#[test]
fn a_process_without_the_jobs_key_is_refused_by_name() {
    let Some(hosts) = two_hosts() else { return };
    let other = rcgen::generate_simple_self_signed([byway_fabric::tls::GROUP_NAME.to_owned()]).unwrap();
    let other = format!("export BYWAY_DSM_TLS='{}{}'", other.cert.pem(), other.signing_key.serialize_pem());
    for (rank, does) in [(0, "unset BYWAY_DSM_TLS"), (1, "unset BYWAY_DSM_TLS"), (0, &other), (1, &other)] {
        let sor = example("sor");
        let script = format!("[ $BYWAY_DSM_RANK = {rank} ] && {does}; exec {} 64 2", sor.display());
        let job = Launch { program: "sh".into(), ..hosts.job(2, 7000, "sor", &["-c", &script]) };
        let (end, lines) = run(&job);
        assert!(matches!(end, JobEnd::Failed { .. }), "{end:?}: {lines:?}");
        let named = |(_, line): &(usize, String)| line.contains("rank 0 and this process have no key in common");
        assert!(lines.iter().any(named), "rank {rank}, {does}: {lines:?}");
    }
}

/// The connection ends as one with a process that lacks the key, but nothing listens there any more.
#[test]
fn a_process_that_dies_while_another_one_connects_is_the_one_that_failed() {
    let Some(hosts) = two_hosts() else { return };
    let (end, lines) = run(&hosts.job(2, 7000, "trouble", &["dies"]));
    let JobEnd::Failed { rank: 0, status } = end else { panic!("{end:?}: {lines:?}") };
    assert_eq!(status.code(), Some(3), "{lines:?}");
    assert!(!lines.iter().any(|(_, line)| line.contains("no key in common")), "{lines:?}");
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
    assert!(lines.iter().any(|(_, line)| line.contains("cannot listen at tcp://10.213.77.1:7000")), "{lines:?}");
}

/// As after an update of one host alone.
#[test]
fn another_build_of_the_program_on_one_host_is_named() {
    let Some(hosts) = two_hosts() else { return };
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("sor");
    let mut program = std::fs::read(example("sor")).unwrap();
    program.push(0);
    std::fs::write(&other, program).unwrap();
    std::fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let script =
        format!("[ $BYWAY_DSM_RANK = 0 ] && exec {} 64 2; exec {} 64 2", example("sor").display(), other.display());
    let job = Launch { program: "sh".into(), ..hosts.job(2, 7000, "sor", &["-c", &script]) };
    let (end, lines) = run(&job);
    assert!(matches!(end, JobEnd::Failed { .. }), "{end:?}: {lines:?}");
    assert!(lines.iter().any(|(_, line)| line.contains("runs another program than this process")), "{lines:?}");
}
