//! The two libraries, loaded at the first use of RDMA and never unloaded.

use super::error::RdmaError;
use super::verbs::{ConnectionManager, Functions, Verbs};

/// The loaded libraries; as small as a reference.
#[cfg(feature = "rdma")]
#[derive(Clone, Copy)]
pub struct Library(&'static Functions);

/// The loaded libraries: there are none in a build without the feature `rdma`.
#[cfg(not(feature = "rdma"))]
#[derive(Clone, Copy)]
pub enum Library {}

#[cfg(feature = "rdma")]
impl Library {
    /// Loads libibverbs and librdmacm, the first time.
    ///
    /// # Errors
    /// [`RdmaError::LibraryMissing`] and [`RdmaError::SymbolMissing`]; a later call tries again. [`RdmaError::NotBuilt`] in a
    /// build without the feature `rdma`.
    pub fn load() -> Result<Self, RdmaError> {
        loading::load().map(Self)
    }

    fn functions(self) -> &'static Functions {
        self.0
    }
}

#[cfg(not(feature = "rdma"))]
impl Library {
    /// # Errors
    /// [`RdmaError::NotBuilt`].
    pub fn load() -> Result<Self, RdmaError> {
        Err(RdmaError::NotBuilt)
    }

    fn functions(self) -> &'static Functions {
        match self {}
    }
}

impl Library {
    /// librdmacm keeps unused devices open, and notices a removed one only when it lists them. The kernel cannot take some devices
    /// (soft-RoCE) from processes that have them open, and delays the removal until then.
    pub(super) fn forget_removed_devices(self) {
        let mut count = 0;
        // SAFETY: the place for the number is valid for the call; of the list nothing is kept.
        let list = unsafe { (self.connection().rdma_get_devices)(&raw mut count) };
        if !list.is_null() {
            // SAFETY: the list is the one above, freed once.
            unsafe { (self.connection().rdma_free_devices)(list) };
        }
    }

    pub(super) fn verbs(self) -> &'static Verbs {
        &self.functions().verbs
    }

    pub(super) fn connection(self) -> &'static ConnectionManager {
        &self.functions().connection
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Library")
    }
}

#[cfg(feature = "rdma")]
mod loading {
    use std::sync::OnceLock;

    use super::{ConnectionManager, Functions, RdmaError, Verbs};

    const VERBS: &str = "libibverbs.so.1";
    const CONNECTION: &str = "librdmacm.so.1";

    /// Loaded once in the life of the process: librdmacm keeps the devices open that it has met, and what it gave out
    /// points into it, so that unloading it could never be known to be safe.
    static LOADED: OnceLock<(Functions, [libloading::Library; 2])> = OnceLock::new();

    /// Why a library did not load, the first time: errors are copied about, and the loader's words are not.
    static REASONS: [OnceLock<String>; 2] = [const { OnceLock::new() }; 2];

    pub(super) fn load() -> Result<&'static Functions, RdmaError> {
        if let Some((functions, _)) = LOADED.get() {
            return Ok(functions);
        }
        let verbs_library = open(VERBS, "libibverbs1", &REASONS[0])?;
        let connection_library = open(CONNECTION, "librdmacm1", &REASONS[1])?;
        let missing = |library| move |symbol| RdmaError::SymbolMissing { library, symbol };
        // SAFETY: the libraries are those of the headers, by their names and major versions, whose interface does not
        // change, and stay loaded for ever.
        let verbs = unsafe { Verbs::find(&verbs_library) }.map_err(missing(VERBS))?;
        // SAFETY: as above.
        let connection = unsafe { ConnectionManager::find(&connection_library) }.map_err(missing(CONNECTION))?;
        // Another thread may have been faster; the loader counts, and both found the same.
        let loaded = LOADED.get_or_init(|| (Functions { verbs, connection }, [verbs_library, connection_library]));
        Ok(&loaded.0)
    }

    pub(super) fn open(
        name: &'static str,
        package: &'static str,
        reason: &'static OnceLock<String>,
    ) -> Result<libloading::Library, RdmaError> {
        // SAFETY: what these libraries do when loaded is to look at the environment and register providers.
        unsafe { libloading::Library::new(name) }.map_err(|error| RdmaError::LibraryMissing {
            library: name,
            reason: reason.get_or_init(|| error.to_string()),
            package,
        })
    }
}

#[cfg(all(test, feature = "rdma"))]
mod tests {
    use std::sync::OnceLock;

    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_its_package() {
        static REASON: OnceLock<String> = OnceLock::new();
        let error = loading::open("libno-such-thing.so.1", "no-such-package", &REASON).unwrap_err();
        assert!(matches!(error, RdmaError::LibraryMissing { library: "libno-such-thing.so.1", .. }), "{error:?}");
        assert!(error.to_string().contains("install the package no-such-package"), "{error}");
    }

    #[test]
    fn loading_succeeds_or_says_what_to_install() {
        match Library::load() {
            // Whatever the kernel has, asking for devices is answered.
            Ok(library) => match library.devices() {
                Ok(devices) => assert!(devices.iter().all(|device| !device.name.is_empty())),
                Err(error) => assert!(matches!(error, RdmaError::KernelMissing { .. }), "{error}"),
            },
            Err(error) => assert!(error.to_string().contains("install"), "{error}"),
        }
    }
}
