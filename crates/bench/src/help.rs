//! Help texts of the benches, besides their flags.

/// Of `byway bench volume`.
pub(crate) const BENCH_VOLUME: &str = "\
Examples:
  byway bench volume byway://store1/disk
  byway bench volume nbd://store1/disk --rw read --bs 1M --depth 8
  byway bench volume byway://127.0.0.1/scratch --rw randwrite --overwrite --metrics 127.0.0.1:4712

Exit status:
  0 on success, 1 on failure, 2 for an invalid command line.";

/// Of `byway bench fabric`.
pub(crate) const BENCH_FABRIC: &str = "\
Examples:
  byway bench fabric
  byway bench fabric --clients 64,256 --mode driven --rounds 3

Exit status:
  0 on success, 1 on failure, 2 for an invalid command line.";

/// Of `byway bench figures`.
pub(crate) const BENCH_FIGURES: &str = "\
Examples:
  byway bench figures --out figures       about 12 minutes; the report is figures/report.html
  byway bench figures --quick

Exit status:
  0 once the report is written, whatever its verdicts; 1 on failure; 2 for an invalid command line.";
