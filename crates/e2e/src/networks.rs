//! Two network namespaces with a cable between them, which a test pulls and plugs in again.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use crate::{LIMIT, SkipReason, find_tool, skip, until};

/// Where the near end of the cable is, and the far one.
pub const NEAR: &str = "10.77.0.1";
/// See [`NEAR`].
pub const FAR: &str = "10.77.0.2";

/// Which namespace a program runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// With the address [`NEAR`].
    Near,
    /// With the address [`FAR`].
    Far,
}

/// See the module. The namespaces live as long as this, or the last program in them.
pub struct Networks {
    near: Holder,
    far: Holder,
    nsenter: PathBuf,
    ip: PathBuf,
}

/// A process that keeps a namespace.
struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Holder {
    /// Starts one, and waits until it has left our namespace.
    fn start(unshare: &Path) -> Option<Self> {
        let mut command = Command::new(unshare);
        command.args(["--net", "sleep", "4000"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut holder = Self(command.spawn().ok()?);
        let ours = std::fs::read_link("/proc/self/ns/net").ok()?;
        let theirs = format!("/proc/{}/ns/net", holder.0.id());
        until(Instant::now() + LIMIT, "a network namespace", || {
            if holder.0.try_wait().ok()?.is_some() {
                return Some(false);
            }
            (std::fs::read_link(&theirs).ok()? != ours).then_some(true)
        })
        .then_some(holder)
    }
}

impl Networks {
    /// Makes both; `None`, said aloud, where that is not to be had.
    pub fn new(test: &str) -> Option<Self> {
        let mut tools = Vec::new();
        for name in ["unshare", "nsenter", "ip"] {
            let Some(tool) = find_tool(name) else {
                skip(test, SkipReason::MissingTool(name));
                return None;
            };
            tools.push(tool);
        }
        let (near, far) = (Holder::start(&tools[0]), Holder::start(&tools[0]));
        let (Some(near), Some(far)) = (near, far) else {
            skip(test, SkipReason::Machine("no network namespace can be made (it needs root)"));
            return None;
        };
        let networks = Self { near, far, nsenter: tools.remove(1), ip: tools.remove(1) };
        let other = networks.far.0.id().to_string();
        let pair = ["link", "add", "wire0", "type", "veth", "peer", "name", "wire0", "netns", &other];
        if !networks.ip(Side::Near, &pair) {
            skip(test, SkipReason::Machine("the kernel has no veth"));
            return None;
        }
        for (side, address) in [(Side::Near, NEAR), (Side::Far, FAR)] {
            let address = format!("{address}/24");
            let steps: [&[&str]; 3] = [
                &["link", "set", "lo", "up"],
                &["address", "add", &address, "dev", "wire0"],
                &["link", "set", "wire0", "up"],
            ];
            assert!(steps.into_iter().all(|step| networks.ip(side, step)), "the cable is laid");
        }
        Some(networks)
    }

    fn ip(&self, side: Side, arguments: &[&str]) -> bool {
        self.command(side, &self.ip).args(arguments).status().is_ok_and(|status| status.success())
    }

    /// A command that runs a program on that side.
    pub fn command(&self, side: Side, program: &Path) -> Command {
        let holder = if side == Side::Near { &self.near } else { &self.far };
        let mut command = Command::new(&self.nsenter);
        command.arg(format!("--net=/proc/{}/ns/net", holder.0.id())).arg("--").arg(program).stdin(Stdio::null());
        command
    }

    /// Pulls the cable, or plugs it in again.
    ///
    /// # Panics
    /// If it cannot.
    pub fn plug(&self, is_in: bool) {
        let state = if is_in { "up" } else { "down" };
        assert!(self.ip(Side::Far, &["link", "set", "wire0", state]), "the cable is moved");
    }
}
