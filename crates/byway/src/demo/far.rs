//! A step of a demonstration: memory of which a quarter is here, and the rest is lent by another node.

use std::path::Path;
use std::time::Instant;

use byway_frontend::far_memory::{FarMemory, FarMemoryError, FarMemoryOptions};
use byway_reactor::{Address, IoChoice};
use byway_service::memory::pool::Class;
use serde::Serialize;

use super::DemoError;
use super::restart::ChildNode;
use crate::units::show_size;

const BYTES: usize = 32 << 20;
const RESIDENT_BYTES: usize = BYTES / 4;
const PAGE_BYTES: usize = 4096;

/// What that came to.
#[derive(Debug, Serialize)]
pub(super) struct FarShown {
    /// Why it was left out; `None`: it was not.
    left_out: Option<String>,
    faults: u64,
    pages_fetched: u64,
    pages_fetched_ahead: u64,
    pages_put: u64,
    read_megabytes_per_second: f64,
}

impl FarShown {
    fn left_out(why: &FarMemoryError) -> Self {
        Self {
            left_out: Some(why.to_string()),
            faults: 0,
            pages_fetched: 0,
            pages_fetched_ahead: 0,
            pages_put: 0,
            read_megabytes_per_second: 0.0,
        }
    }

    /// For people.
    pub(super) fn sentence(&self) -> String {
        if let Some(why) = &self.left_out {
            return format!("Memory lent by another node was left out: {why}.");
        }
        format!(
            "{} of memory, of which {} may be here, were filled and read; another node lent the rest. {} pages were sent to it, {} came \
             back,\n{} of them before they were touched; a page was waited for {} times. The read went at {:.0} MB/s, and each page had its \
             bytes.",
            show_size(BYTES as u64),
            show_size(RESIDENT_BYTES as u64),
            self.pages_put,
            self.pages_fetched,
            self.pages_fetched_ahead,
            self.faults,
            self.read_megabytes_per_second
        )
    }
}

fn page_of(number: usize) -> [u8; PAGE_BYTES] {
    std::array::from_fn(|at| (number * 31 + at) as u8)
}

/// Fills the memory and reads it, with a node in `folder` that lends.
pub(super) fn show(folder: &Path, io: IoChoice) -> Result<FarShown, DemoError> {
    let mut node = ChildNode::new(["--lend", "256M,guard=0"], folder.join("lender"), io);
    node.start().and_then(|()| node.wait_until_ready()).map_err(DemoError::Child)?;
    let opened = FarMemory::open(FarMemoryOptions {
        bytes: BYTES,
        resident_bytes: RESIDENT_BYTES,
        lenders: vec![Address::Unix(node.socket().to_owned())],
        class: Class::None,
        spill: None,
        encrypt: false,
    });
    let mut memory = match opened {
        Ok(memory) => memory,
        // Not every user may handle page faults.
        Err(error @ FarMemoryError::Userfault(_)) => return Ok(FarShown::left_out(&error)),
        Err(error) => return Err(DemoError::Far(error)),
    };
    for (number, page) in memory.bytes_mut().as_chunks_mut::<PAGE_BYTES>().0.iter_mut().enumerate() {
        *page = page_of(number);
    }
    let began = Instant::now();
    for (number, page) in memory.bytes().as_chunks::<PAGE_BYTES>().0.iter().enumerate() {
        if *page != page_of(number) {
            return Err(DemoError::FarDiffers { page: number });
        }
    }
    let counters = memory.counters();
    Ok(FarShown {
        left_out: None,
        faults: counters.faults,
        pages_fetched: counters.fetched,
        pages_fetched_ahead: counters.ahead,
        pages_put: counters.put,
        read_megabytes_per_second: BYTES as f64 / began.elapsed().as_secs_f64() / 1e6,
    })
}
