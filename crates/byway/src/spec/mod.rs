//! Volume specifications, as `--volume` and the configuration file write them:
//!
//! ```text
//! NAME=STORE[,OPTION]...
//!
//! STORE   PATH                          a file or block device
//!         mem:SIZE                      memory of this node, empty at start
//!         null:SIZE                     reads zeroes, discards writes
//!         stripe:chunk=SIZE:PATH:PATH…  RAID 0; chunk is a power of two, 4K to 64M
//!         fault:RULE[:RULE]…:STORE      another store with injected faults, for tests
//! OPTION  ro                            refuse writes
//!         direct                        past the page cache (paths only)
//!         stage=device                  between disk and wire in the disk's own controller memory (direct only); or memory
//!         shared                        serve it although it is in use on this machine
//!         format=raw                    serve the bytes also of an image that looks like qcow2, vmdk, ...
//!         tls=required                  refuse connections without TLS
//!         rate=SIZE[/s]                 bytes per second, reads and writes together
//!         access=CLIENT[:ro]            only for this client, :ro to be read; repeated for several
//!         description=TEXT              what listings show
//! CLIENT  NAME                          a subject alternative name (DNS or URI) of the client's certificate
//!         ADDRESS[/BITS]                a range of addresses
//!         unix                          clients of unix sockets and shared memory
//! RULE    OPERATION=EFFECT[@OFFSET+LENGTH][#COUNT]
//!         OPERATION any read write flush trim zero extents
//!         EFFECT    a time (10ms: waits), short (half of it), or eio enospc enomem eperm etimedout (fails)
//! ```
//!
//! A comma ends an option and a colon ends a part of a store. To use `,` `:` `=` `"` `\` as themselves in a path or a
//! description, put a backslash before it or the whole between double quotes; inside quotes, only `"` and `\` need a
//! backslash. A path that looks like `word:…` is quoted or written `./word:…`. Text is UTF-8.
//!
//! Sizes have the binary suffixes K, M, G and T; sizes of memory and null volumes are multiples of 512.
//!
//! ```
//! let spec = byway::spec::parse(r#"scratch=/srv/scratch.img,ro,description="two, three""#).unwrap();
//! assert_eq!(spec.name.as_str(), "scratch");
//! assert_eq!(byway::spec::parse(&byway::spec::format(&spec)).unwrap(), spec);
//! ```

mod fault;
mod format;
mod options;
mod share;
mod store;
mod text;

#[cfg(test)]
mod tests;

use byway_fabric::access::AccessError;
use byway_service::block::spec::{StoreSpec, VolumeName, VolumeNameError, VolumeSpec};

use crate::limits;
use crate::units::UnitError;
use text::Text;

pub use format::format;
pub(crate) use options::{FORMAT_USAGE, check_direct, check_rate, check_shared, check_stage};
pub use share::parse_share;
pub(crate) use share::{parse_users, parse_writers};

/// What is wrong with a specification, and where.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("character {column}: {fault}")]
pub struct SpecError {
    /// The character, counted from 1, at which the wrong part starts.
    pub column: usize,
    /// What is wrong, and what to write instead.
    pub fault: SpecFault,
}

/// What can be wrong with a specification.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpecFault {
    /// Over [`limits::SPEC_BYTES_MAX`].
    #[error("the specification is longer than {} bytes; write a shorter one", limits::SPEC_BYTES_MAX)]
    TooLong,
    /// A quote that nothing closes, or a backslash at the end.
    #[error("{0}")]
    Quote(&'static str),
    /// No `NAME=`.
    #[error("the name is missing; write NAME=PATH, for example disk=/srv/disk.img")]
    NoName,
    /// A bad name.
    #[error("{0}")]
    Name(#[from] VolumeNameError),
    /// Nothing where a path should be.
    #[error("the path is missing; write {0}")]
    NoPath(&'static str),
    /// `word:` that is no kind of store.
    #[error("unknown store `{0}:`; write mem:SIZE, null:SIZE, stripe:…, fault:…, or ./{0}:… if it is a file")]
    Scheme(String),
    /// A bad size or time.
    #[error("{0}")]
    Unit(#[from] UnitError),
    /// A size of a memory or null volume.
    #[error("a volume cannot have {bytes} bytes; write a multiple of 512, for example {nearest}")]
    VolumeBytes {
        /// What was asked for.
        bytes: u64,
        /// The next that is one.
        nearest: u64,
    },
    /// `stripe:` without a chunk.
    #[error("a stripe starts with its chunk; write stripe:chunk=64K:PATH:PATH")]
    NoChunk,
    /// A bad chunk.
    #[error("invalid chunk of {0} bytes; write a power of two from 4K to 64M, for example chunk=64K")]
    Chunk(u64),
    /// One path, or too many.
    #[error("a stripe over {0} path(s); write 2 to {max}, separated by colons", max = limits::STRIPE_PATHS_MAX)]
    StripePaths(usize),
    /// `fault:` without a rule.
    #[error("a fault store starts with a rule; write fault:read=eio:STORE or fault:any=10ms:STORE")]
    NoRule,
    /// Too many rules, or fault in fault in fault.
    #[error("{0}")]
    TooManyFaults(&'static str),
    /// An operation that no rule is about.
    #[error("unknown operation `{0}`; write any, read, write, flush, trim, zero or extents")]
    Operation(String),
    /// An effect that there is not.
    #[error("unknown effect `{0}`; write a time such as 10ms, or short, eio, enospc, enomem, eperm or etimedout")]
    Effect(String),
    /// Not `@OFFSET+LENGTH`.
    #[error("invalid range `{0}`; write @OFFSET+LENGTH with a length over 0, for example @1M+64K")]
    Range(String),
    /// Not `#COUNT`.
    #[error("invalid count `{0}`; write #COUNT with a number over 0, for example #1")]
    Count(String),
    /// An option that there is not.
    #[error(
        "unknown option `{0}`; write ro, direct, stage=device, shared, format=raw, tls=required, rate=SIZE, access=CLIENT \
         or description=TEXT (a comma inside a path needs a backslash or quotes)"
    )]
    Option(String),
    /// An option of a share that there is not.
    #[error(
        "unknown option `{0}` of a share; write ro, users=squash:UID, users=map:FILE, users=trust, writers=exclusive, access=CLIENT or description=TEXT (a comma inside \
         a path needs a backslash or quotes)"
    )]
    ShareOption(String),
    /// A bad `users=`.
    #[error(
        "invalid users `{0}`; write users=squash:UID[:GID] with numbers, users=map:FILE, users=trust or users=trust-root"
    )]
    Users(String),
    /// A bad `writers=`.
    #[error(
        "invalid writers `{0}`; write writers=local, or writers=exclusive if no program of this machine changes the directory's files"
    )]
    Writers(String),
    /// A rate under [`limits::RATE_BYTES_MIN`].
    #[error("a rate of {0} bytes per second is under 1K/s; write for example 100M/s")]
    Rate(u64),
    /// A bad client.
    #[error("{0}")]
    Access(#[from] AccessError),
    /// The same option again.
    #[error("`{0}` is given twice; give it once")]
    Twice(&'static str),
    /// A value for a flag, or none where one belongs.
    #[error("{0}")]
    Value(&'static str),
    /// Options that do not fit the store.
    #[error("direct is for files and devices, and this store is {0}; leave it out")]
    DirectStore(&'static str),
    /// A shared file through this machine's page cache.
    #[error(
        "shared needs direct: this machine's page cache would hide what another machine writes to the device; \
         add direct, or leave shared out"
    )]
    SharedCached,
    /// A stage for a volume that has none.
    #[error("stage is for direct volumes; add direct, or leave it out")]
    Stage,
    /// Over [`limits::DESCRIPTION_BYTES_MAX`].
    #[error("the description is longer than {} bytes; write a shorter one", limits::DESCRIPTION_BYTES_MAX)]
    Description,
}

/// Reads one specification.
///
/// # Errors
/// Says what is wrong, at which character, and what to write instead.
pub fn parse(spec: &str) -> Result<VolumeSpec, SpecError> {
    if spec.len() > limits::SPEC_BYTES_MAX {
        return Err(SpecError { column: 1, fault: SpecFault::TooLong });
    }
    let text = Text::read(spec)?;
    let mut parts = text.split(',').into_iter();
    // Splitting always gives at least one part, if an empty one.
    let first = parts.next().unwrap_or_else(|| text.clone());
    let (name, store) = first.split_once('=').ok_or_else(|| first.error(SpecFault::NoName))?;
    if name.is_empty() {
        return Err(name.error(SpecFault::NoName));
    }
    let volume_name = VolumeName::new(&name.value()).map_err(|fault| name.error(fault.into()))?;
    let mut volume = VolumeSpec::new(volume_name, parse_store_text(&store)?);
    options::apply(&mut volume, parts)?;
    Ok(volume)
}

/// Reads a store alone, as [`parse`] does after `NAME=`.
///
/// # Errors
/// As for [`parse`].
pub fn parse_store(store: &str) -> Result<StoreSpec, SpecError> {
    if store.len() > limits::SPEC_BYTES_MAX {
        return Err(SpecError { column: 1, fault: SpecFault::TooLong });
    }
    let text = Text::read(store)?;
    if text.split(',').len() > 1 {
        return Err(
            text.error(SpecFault::Value("a store has no options here; quote the comma, or use keys of the table"))
        );
    }
    parse_store_text(&text)
}

fn parse_store_text(text: &Text) -> Result<StoreSpec, SpecError> {
    store::parse(text, 0)
}
