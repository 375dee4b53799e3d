//! Reloads: the configuration is read again, and volumes, certificates and the allowed addresses change under running
//! clients. All of it, or, with a reason, nothing.

mod shares;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use byway_service::block::spec::{StoreSpec, VolumeSpec};
use byway_service::block::{OpenError, Store, StoreOptions, Volume, VolumeOptions};
use byway_service::file::ShareError;
use serde::{Deserialize, Serialize};

use crate::config::{Configuration, Tls};
use crate::opener::Files;

pub use self::shares::{note_shares, plan_shares};

/// A volume that is served, and what it was made by.
#[derive(Clone, Debug)]
pub struct Served {
    /// As configured.
    pub spec: VolumeSpec,
    /// What the loops serve.
    pub volume: Arc<Volume>,
}

/// What a reload changed, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Served from now on.
    pub added: Vec<String>,
    /// No longer served: their clients' connections ended.
    pub dropped: Vec<String>,
    /// In another size.
    pub resized: Vec<String>,
    /// With other options.
    pub changed: Vec<String>,
    /// Opened anew, as other options of their files or another file under their path ask for, or as an operator asked:
    /// their clients' connections ended.
    #[serde(default)]
    pub reopened: Vec<String>,
    /// Certificates, and revocation lists where there are any, were read again.
    #[serde(default)]
    pub certificates: bool,
    /// Sessions that were ended: their certificate is revoked by now, or they have lost access to a volume.
    #[serde(default)]
    pub sessions_ended: usize,
    /// What had not happened yet when the reload was answered, in sentences; it will. Mostly nothing.
    #[serde(default)]
    pub pending: Vec<String>,
}

/// Why a reload changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// A volume cannot be opened as it is configured now.
    #[error("volume `{name}`: {source}{hint}")]
    Volume {
        /// Which.
        name: String,
        /// Why.
        source: OpenError,
        /// What to do, where the file is ours already.
        hint: String,
    },
    /// A share cannot be opened as it is configured now.
    #[error("share `{name}`: {source}")]
    Share {
        /// Which.
        name: String,
        /// Why.
        source: ShareError,
    },
    /// Something else has changed.
    #[error("{0} cannot change while the node runs; restart the node, or restore the old value")]
    Fixed(&'static str),
    /// Memory that would be cut off may be written at that moment.
    #[error("volume `{0}`: a memory volume can only grow; remove it in one reload, and add it smaller in the next")]
    Shrinks(String),
    /// `byway ctl reopen` names something else.
    #[error("no volume is named `{0}`; byway ctl status lists them")]
    NoVolume(String),
    /// `byway ctl reopen` of memory.
    #[error("volume `{0}` is in memory and has no file to reopen; to empty it, remove and add it by reloads")]
    NoFile(String),
    /// A node without volumes is a mistake.
    #[error("the configuration names no volume, share or memory to lend; to stop serving, stop the node")]
    Nothing,
    /// Certificates.
    #[error("TLS: {0}")]
    Tls(#[from] byway_fabric::tls::TlsSetupError),
}

/// What the volumes will be. Nothing has changed yet but what can be let go of without a trace.
#[derive(Debug)]
pub struct Plan {
    /// All volumes.
    pub served: Vec<Served>,
    /// What is different.
    pub summary: Summary,
}

/// How long a reload waits: to a deadline, and not once the node is told to end.
#[derive(Clone, Debug)]
pub struct Patience {
    /// When it ends in any case.
    pub deadline: Instant,
    /// The node is told to end.
    pub ending: Arc<AtomicBool>,
}

impl Patience {
    /// Between two looks at `ending`.
    const STEP: Duration = Duration::from_millis(10);

    fn is_over(&self) -> bool {
        self.ending.load(Ordering::Relaxed) || Instant::now() >= self.deadline
    }

    /// Waits for a message; `None` if none came.
    pub fn receive<T>(&self, receiver: &Receiver<T>) -> Option<T> {
        loop {
            match receiver.recv_timeout(Self::STEP) {
                Err(RecvTimeoutError::Timeout) if !self.is_over() => {}
                received => return received.ok(),
            }
        }
    }
}

/// Volumes that a reload has taken out, until their last request has ended: until then their files are open and locked.
#[derive(Debug)]
pub struct Retired(Vec<(String, Weak<Volume>)>);

impl Retired {
    /// Those of `old` that `new` does not go on with.
    pub fn between(old: &[Served], new: &[Served]) -> Self {
        let stays = |served: &&Served| new.iter().any(|other| other.volume.is_same(&served.volume));
        let gone = old.iter().filter(|served| !stays(served));
        Self(gone.map(|served| (served.spec.name.to_string(), Arc::downgrade(&served.volume))).collect())
    }

    /// Waits until no loop has them any more, as long as `patience` lasts; gives the names of those that one still has.
    pub fn wait(mut self, patience: &Patience) -> Vec<String> {
        loop {
            self.0.retain(|(_, volume)| volume.strong_count() > 0);
            if self.0.is_empty() || patience.is_over() {
                return self.0.into_iter().map(|(name, _)| name).collect();
            }
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
            let _ = rustix::thread::nanosleep(&pause);
        }
    }
}

/// What has not happened by the end of the wait, in sentences.
pub fn pending(silent_loops: usize, busy: &[String], waited: Duration) -> Vec<String> {
    let seconds = waited.as_secs();
    let mut pending = Vec::new();
    if silent_loops > 0 {
        pending.push(format!(
            "{silent_loops} event loops have not confirmed within {seconds} s; the reload stands, and they will do as it \
             says once they come to it (byway ctl status says whether they answer)"
        ));
    }
    // While a loop is silent it holds them all.
    if !busy.is_empty() && silent_loops == 0 {
        pending.push(format!(
            "requests to {} are still in flight after {seconds} s; the files stay open and locked until those end",
            busy.join(", ")
        ));
    }
    pending
}

/// Opens a volume as its specification says.
///
/// # Errors
/// See [`OpenError`].
pub fn open_volume(spec: &VolumeSpec, files: &dyn Files) -> Result<Volume, OpenError> {
    let store = open_store(&spec.store, spec, files, None)?;
    Ok(Volume::new(spec.name.as_str(), store, options_of(spec)))
}

/// Opens the volume of a specification in place of one with the same name, and takes over the locks that this has.
fn reopen(old: &Volume, spec: &VolumeSpec, files: &dyn Files) -> Result<Volume, OpenError> {
    let store = open_store(&spec.store, spec, files, Some(old.store()))?;
    Ok(old.reopened_by(store, options_of(spec)))
}

fn open_store(
    store: &StoreSpec,
    spec: &VolumeSpec,
    files: &dyn Files,
    old: Option<&Store>,
) -> Result<Store, OpenError> {
    let stage = spec.stage.unwrap_or_default();
    let (read_only, direct, shared, raw) = (spec.read_only, spec.direct, spec.shared, spec.raw);
    let options = StoreOptions { read_only, direct, shared, raw, stage };
    Ok(match (store, old) {
        (StoreSpec::Path(path), None) => Store::path(path, options, files)?,
        (StoreSpec::Path(path), Some(old)) => {
            Store::in_place_of(old, std::slice::from_ref(path), None, options, files)?
        }
        (StoreSpec::Memory { bytes }, _) => Store::memory(spec.name.as_str(), *bytes)?,
        (StoreSpec::Null { bytes }, _) => Store::null(*bytes),
        (StoreSpec::Stripe { chunk_bytes, paths }, None) => Store::stripe(paths, *chunk_bytes, options, files)?,
        (StoreSpec::Stripe { chunk_bytes, paths }, Some(old)) => {
            Store::in_place_of(old, paths, Some(*chunk_bytes), options, files)?
        }
        (StoreSpec::Fault { inner, .. }, old) => match inner.innermost() {
            StoreSpec::Null { .. } => return Err(OpenError::Fault),
            inner => open_store(inner, spec, files, old)?,
        },
    })
}

fn options_of(spec: &VolumeSpec) -> VolumeOptions {
    VolumeOptions {
        read_only: spec.read_only,
        tls_required: spec.tls_required,
        description: spec.description.clone().unwrap_or_default(),
        volatile: matches!(spec.store.innermost(), StoreSpec::Memory { .. }),
        rate_bytes_per_second: spec.rate_bytes_per_second,
        faults: spec.store.faults(),
        access: spec.access.clone(),
    }
}

/// Checks that only what can change has changed.
///
/// # Errors
/// [`ReloadError::Fixed`].
pub fn check_fixed(old: &Configuration, new: &Configuration) -> Result<(), ReloadError> {
    let mode = |configuration: &Configuration| configuration.tls.as_ref().map(|tls| tls.mode);
    let shown = |configuration: &Configuration| configuration.tls.as_ref().map(Tls::authentication);
    let fixed = [
        (old.listen == new.listen, "listen"),
        (old.nbd == new.nbd, "nbd"),
        (old.http == new.http, "http"),
        (old.control_socket == new.control_socket, "control_socket"),
        (old.io == new.io, "io"),
        (old.frame_bytes == new.frame_bytes, "buffer_memory"),
        (old.mapped_bytes == new.mapped_bytes, "mmap_limit"),
        (old.lend == new.lend, "lend"),
        (old.threads == new.threads, "threads"),
        (old.user == new.user, "user"),
        (old.slow_us == new.slow_us, "slow_us"),
        (mode(old) == mode(new), "whether there is TLS, and whether it is required"),
        // Also where TLS is optional: some volumes may be for those alone who use it.
        (shown(old) == shown(new), "whether clients show certificates"),
    ];
    fixed.into_iter().find(|(same, _)| !same).map_or(Ok(()), |(_, what)| Err(ReloadError::Fixed(what)))
}

/// Opens what is new and looks what has another size. Memory grows here, last: of a plan that then fails nothing is left
/// but room that nobody sees.
///
/// # Errors
/// See [`ReloadError`]; what was served goes on as it was.
pub fn plan(old: &[Served], specs: &[VolumeSpec], files: &dyn Files) -> Result<Plan, ReloadError> {
    let mut plan = Plan { served: Vec::with_capacity(specs.len()), summary: Summary::default() };
    let mut memory = Vec::new();
    for spec in specs {
        let name = spec.name.to_string();
        let failed = |source| ReloadError::Volume { hint: hint(&source, spec, old), name: name.clone(), source };
        let before = old.iter().find(|served| served.spec.name == spec.name);
        let volume = match before {
            Some(before) if same_files(&before.spec, spec) => {
                if spec.store.memory_bytes() < before.spec.store.memory_bytes() {
                    return Err(ReloadError::Shrinks(name));
                }
                if before.spec.store.memory_bytes() != spec.store.memory_bytes() {
                    memory.push(plan.served.len());
                }
                let moved = before.volume.store().moved(|path| files.identify(path)).map_err(failed)?;
                if let Some(path) = moved {
                    tracing::info!(volume = %name, path = %path.display(), "the path names another file now; opening it");
                    Arc::new(reopen(&before.volume, spec, files).map_err(failed)?)
                } else {
                    successor(before, spec).map_err(failed)?
                }
            }
            Some(before) => Arc::new(reopen(&before.volume, spec, files).map_err(failed)?),
            None => Arc::new(open_volume(spec, files).map_err(failed)?),
        };
        plan.served.push(Served { spec: spec.clone(), volume });
    }
    for index in memory {
        let served = &mut plan.served[index];
        let name = served.spec.name.to_string();
        let failed = |source| ReloadError::Volume { name: name.clone(), source, hint: String::new() };
        served.volume.store().resize_memory(served.spec.store.memory_bytes().unwrap_or(0)).map_err(failed)?;
        if let Some(store) = served.volume.store().reopened().map_err(failed)? {
            served.volume = Arc::new(served.volume.succeeded_by(store, options_of(&served.spec)));
        }
    }
    plan.summary = summary(old, &plan.served);
    Ok(plan)
}

/// Opens the files of one volume anew, as an operator does after a flush has failed.
///
/// # Errors
/// See [`ReloadError`]; what was served goes on as it was.
pub fn plan_reopening(old: &[Served], name: &str, files: &dyn Files) -> Result<Plan, ReloadError> {
    let at = old.iter().position(|served| served.spec.name.as_str() == name);
    let at = at.ok_or_else(|| ReloadError::NoVolume(name.to_owned()))?;
    let mut served = old.to_vec();
    let Served { spec, volume } = &mut served[at];
    if spec.store.paths().is_empty() {
        return Err(ReloadError::NoFile(name.to_owned()));
    }
    let failed = |source| ReloadError::Volume { name: name.to_owned(), source, hint: String::new() };
    *volume = Arc::new(reopen(volume, spec, files).map_err(failed)?);
    let summary = summary(old, &served);
    Ok(Plan { served, summary })
}

/// The volume over the same open files: itself if nothing has changed.
fn successor(before: &Served, spec: &VolumeSpec) -> Result<Arc<Volume>, OpenError> {
    let store = match spec.store.innermost() {
        StoreSpec::Null { bytes } if *bytes != before.volume.len() => Some(Store::null(*bytes)),
        StoreSpec::Null { .. } | StoreSpec::Memory { .. } => None,
        _ => before.volume.store().reopened()?,
    };
    let options = options_of(spec);
    if store.is_none() && *before.volume.options() == options {
        return Ok(Arc::clone(&before.volume));
    }
    let store = store.unwrap_or_else(|| before.volume.store().clone());
    // A connection that may no longer be: another volume, so that it ends.
    if options.tls_required && !before.spec.tls_required {
        return Ok(Arc::new(before.volume.replaced_by(store, options)));
    }
    Ok(Arc::new(before.volume.succeeded_by(store, options)))
}

/// Whether two specifications mean the same open files, or the same memory: the options that files are opened with
/// concern no other store.
fn same_files(old: &VolumeSpec, new: &VolumeSpec) -> bool {
    let same_store = match (old.store.innermost(), new.store.innermost()) {
        (StoreSpec::Memory { .. }, StoreSpec::Memory { .. }) | (StoreSpec::Null { .. }, StoreSpec::Null { .. }) => true,
        (old, new) => old == new,
    };
    let opened = |spec: &VolumeSpec| (spec.read_only, spec.direct, spec.shared, spec.stage.unwrap_or_default());
    same_store && (old.store.paths().is_empty() || opened(old) == opened(new))
}

/// What to do where a new volume wants a file that this node has locked itself.
fn hint(error: &OpenError, spec: &VolumeSpec, old: &[Served]) -> String {
    let OpenError::InUse { path, .. } = error else { return String::new() };
    let others = old.iter().filter(|served| served.spec.name != spec.name);
    let holder = others.into_iter().find(|served| served.spec.store.paths().contains(&path.as_path()));
    holder.map_or_else(String::new, |holder| {
        format!(
            "; this node serves it as `{}`: take that one out in one reload, and add `{}` in the next",
            holder.spec.name, spec.name
        )
    })
}

fn summary(old: &[Served], new: &[Served]) -> Summary {
    let mut summary = Summary::default();
    let name = |served: &Served| served.spec.name.to_string();
    for served in new {
        match old.iter().find(|before| before.spec.name == served.spec.name) {
            None => summary.added.push(name(served)),
            Some(before) if Arc::ptr_eq(&before.volume, &served.volume) => {}
            Some(before) => {
                let resized = before.volume.len() != served.volume.len();
                if resized {
                    summary.resized.push(name(served));
                }
                let reopened = before.volume.open_epoch() != served.volume.open_epoch();
                if reopened {
                    summary.reopened.push(name(served));
                }
                if before.volume.options() != served.volume.options() || !(resized || reopened) {
                    summary.changed.push(name(served));
                }
            }
        }
    }
    let stays = |served: &&Served| new.iter().any(|other| other.spec.name == served.spec.name);
    summary.dropped = old.iter().filter(|served| !stays(served)).map(name).collect();
    summary
}

#[cfg(test)]
mod tests {
    use byway_service::block::OpenHere;

    use super::*;

    fn specs(texts: &[String]) -> Vec<VolumeSpec> {
        texts.iter().map(|text| crate::spec::parse(text).unwrap()).collect()
    }

    fn patience(seconds: u64) -> Patience {
        Patience { deadline: Instant::now() + Duration::from_secs(seconds), ending: Arc::default() }
    }

    fn names(summary: &Summary) -> [String; 5] {
        let Summary { added, dropped, resized, changed, reopened, .. } = summary;
        [added, dropped, resized, changed, reopened].map(|names| names.join(","))
    }

    #[test]
    fn whether_clients_show_certificates_does_not_change_even_where_tls_is_optional() {
        use clap::Parser;
        let loaded = |mode: &str, tls: &[&str]| {
            let all =
                ["byway", "serve", "--volume", "a=mem:1M", "--tls-certificate", "c", "--tls-key", "k", "--tls", mode];
            let crate::cli::Command::Serve(arguments) = crate::cli::Cli::parse_from(all.iter().chain(tls)).command
            else {
                panic!("that was not `serve`")
            };
            Configuration::load(&arguments).unwrap()
        };
        let (with, without): ([&str; 2], [&str; 0]) = (["--tls-client-ca", "ca"], []);
        for mode in ["required", "optional"] {
            for (old, new) in [(&with[..], &without[..]), (&without[..], &with[..])] {
                let error = check_fixed(&loaded(mode, old), &loaded(mode, new)).unwrap_err();
                assert!(error.to_string().contains("certificates"), "{mode}: {error}");
            }
            assert!(check_fixed(&loaded(mode, &with), &loaded(mode, &["--tls-client-ca", "another"])).is_ok());
        }
    }

    #[test]
    fn a_reload_waits_for_requests_until_the_node_is_told_to_end() {
        let old = plan(&[], &specs(&["a=mem:1M".to_owned()]), &OpenHere).unwrap().served;
        // One that waits for an hour, as it would for a request that does not end.
        let patience = patience(3600);
        let retired = Retired::between(&old, &[]);
        let busy = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| retired.wait(&patience));
            patience.ending.store(true, Ordering::Relaxed);
            waiting.join().unwrap()
        });
        assert_eq!(busy, ["a"]);
    }

    #[test]
    fn volumes_come_go_and_grow() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        std::fs::write(&file, [1; 8192]).unwrap();
        let disk = format!("disk={}", file.display());
        let start = plan(&[], &specs(&[disk.clone(), "m=mem:1M".to_owned(), "n=null:1M".to_owned()]), &OpenHere);
        let start = start.unwrap();
        assert_eq!(names(&start.summary), ["disk,m,n", "", "", "", ""]);

        let same =
            plan(&start.served, &specs(&[disk.clone(), "m=mem:1M".to_owned(), "n=null:1M".to_owned()]), &OpenHere);
        assert_eq!(names(&same.unwrap().summary), ["", "", "", "", ""]);

        std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(1 << 20).unwrap();
        let texts = [format!("{disk},description=d"), "m=mem:2M".to_owned(), "x=mem:1M,rate=1M/s".to_owned()];
        let next = plan(&start.served, &specs(&texts), &OpenHere).unwrap();
        assert_eq!(names(&next.summary), ["x", "n", "disk,m", "disk", ""]);
        let volume = |at: usize| &next.served[at].volume;
        assert!(volume(0).is_same(&start.served[0].volume) && volume(1).is_same(&start.served[1].volume));
        assert_eq!((volume(0).len(), volume(1).len()), (1 << 20, 2 << 20));
    }

    #[test]
    fn a_file_that_was_moved_to_a_volumes_path_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (file, restored) = (folder.path().join("disk"), folder.path().join("restored"));
        std::fs::write(&file, [1; 8192]).unwrap();
        let specs = specs(&[format!("disk={}", file.display())]);
        let start = plan(&[], &specs, &OpenHere).unwrap();
        std::fs::write(&restored, [2; 8192]).unwrap();
        std::fs::rename(&restored, &file).unwrap();
        let next = plan(&start.served, &specs, &OpenHere).unwrap();
        assert_eq!(names(&next.summary), ["", "", "", "", "disk"]);
        let (old, new) = (&start.served[0].volume, &next.served[0].volume);
        assert!(!old.is_same(new) && old.open_epoch() != new.open_epoch());
        assert_eq!(names(&plan(&next.served, &specs, &OpenHere).unwrap().summary), ["", "", "", "", ""]);
        std::fs::remove_file(&file).unwrap();
        let error = plan(&next.served, &specs, &OpenHere).unwrap_err().to_string();
        assert!(error.contains("volume `disk`") && error.contains("create it first"), "{error}");
    }

    /// Every change of the options that files are opened with, on a volume that has the file locked already.
    #[test]
    fn options_of_an_open_file_change_and_its_lock_stays() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        std::fs::write(&file, [1; 8192]).unwrap();
        let specs = |options: &str| specs(&[format!("disk={}{options}", file.display())]);
        let all = ["", ",direct", ",direct,shared", ",ro"];
        for (old, new) in all.iter().flat_map(|old| all.map(|new| (old, new))).filter(|(old, new)| *old != new) {
            let start = plan(&[], &specs(old), &OpenHere).unwrap();
            let next = plan(&start.served, &specs(new), &OpenHere).unwrap_or_else(|e| panic!("{old} to {new}: {e}"));
            drop(start);
            assert_eq!(names(&next.summary)[4], "disk", "{old} to {new}");
            let again = plan_reopening(&next.served, "disk", &OpenHere).unwrap();
            drop(next);
            let locks = !new.contains("shared") && !new.contains("ro");
            let other = std::fs::File::open(&file).unwrap();
            let locked = rustix::fs::flock(&other, rustix::fs::FlockOperation::NonBlockingLockExclusive);
            assert_eq!(locked.is_err(), locks, "{old} to {new}");
            drop(other);
            drop(again);
            assert!(plan(&[], &specs(""), &OpenHere).is_ok(), "{old} to {new}: nothing has it locked any more");
        }
    }

    #[test]
    fn memory_keeps_its_bytes_when_its_options_change() {
        let all = ["", ",ro", ",shared", ",ro,shared"];
        for (old, new) in all.iter().flat_map(|old| all.map(|new| (old, new))).filter(|(old, new)| *old != new) {
            for store in ["mem:1M", "fault:read=eio:mem:1M", "null:1M"] {
                let start = plan(&[], &specs(&[format!("m={store}{old}")]), &OpenHere).unwrap().served;
                let next = plan(&start, &specs(&[format!("m={store}{new}")]), &OpenHere).unwrap();
                let (before, after) = (&start[0].volume, &next.served[0].volume);
                let case = format!("{store}{old} to {store}{new}");
                assert!(after.is_same(before) && after.open_epoch() == before.open_epoch(), "{case}");
                assert_eq!(after.store().overlaps(before.store()), store.contains("mem"), "{case}");
                assert_eq!(after.is_read_only(), new.contains("ro"), "{case}");
            }
            let start = plan(&[], &specs(&[format!("m=mem:2M{old}")]), &OpenHere).unwrap().served;
            let shrunk = plan(&start, &specs(&[format!("m=mem:1M{new}")]), &OpenHere);
            assert!(matches!(shrunk, Err(ReloadError::Shrinks(_))), "{old} to {new}");
            let grown = plan(&start, &specs(&[format!("m=mem:3M{new}")]), &OpenHere).unwrap().served;
            assert!(grown[0].volume.is_same(&start[0].volume), "{old} to {new}");
        }
    }

    #[test]
    fn a_volume_that_was_taken_out_is_waited_for() {
        let old = plan(&[], &specs(&["a=mem:1M".to_owned(), "b=mem:1M".to_owned()]), &OpenHere).unwrap().served;
        let new = plan(&old, &specs(&["a=mem:2M".to_owned()]), &OpenHere).unwrap().served;
        let retired = || Retired::between(&old, &new);
        let request = Arc::clone(&old[1].volume);
        let busy = retired().wait(&patience(0));
        assert_eq!(busy, ["b"], "`a` goes on in another size");
        let said = pending(0, &busy, Duration::from_secs(10));
        assert!(said[0].contains("requests to b") && said[0].contains("10 s"), "{said:?}");
        assert!(pending(1, &busy, Duration::from_secs(10))[0].contains("the reload stands"));
        let retired = retired();
        drop(old);
        let ends = std::thread::spawn(move || drop(request));
        assert!(retired.wait(&patience(60)).is_empty());
        ends.join().unwrap();
    }

    #[test]
    fn nothing_changes_when_something_cannot() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        std::fs::write(&file, [1; 8192]).unwrap();
        let start = plan(&[], &specs(&["m=mem:1M".to_owned(), format!("a={}", file.display())]), &OpenHere).unwrap();
        let missing = specs(&["m=mem:2M".to_owned(), format!("b={}/missing", folder.path().display())]);
        let error = plan(&start.served, &missing, &OpenHere).unwrap_err().to_string();
        assert!(error.contains("volume `b`") && error.contains("missing"), "{error}");
        assert_eq!(start.served[0].volume.store().reopened().unwrap().map(|store| store.len()), None);
        // The same file under another name, while the first still has it.
        let renamed = specs(&[format!("b={}", file.display())]);
        let error = plan(&start.served, &renamed, &OpenHere).unwrap_err().to_string();
        assert!(error.contains("this node serves it as `a`"), "{error}");
    }
}
