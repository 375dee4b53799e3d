//! How long the slices of a read are that is told while its disk still reads ([`ReadFlags::sliced`](super::ReadFlags)).
//!
//! Short slices start the wire early, and leave it little to do when the disk has finished; each costs an operation at the disk
//! and a message. Which of the two weighs more is a matter of the disk, the wire and the load, and nothing that is known
//! beforehand says it: so it is tried out, as in decision 0004. For reads of about one length, and apart for those that have the
//! loop to themselves and those that do not, the length in use and its neighbour are taken in turns; the neighbour stays if it was
//! better in most of the pairs. Times of a disk spread so much that means and medians of a few say little; whoever changes for chance
//! pays for it until the next trial. Then there is a pause, which doubles each time that nothing was better.
//!
//! What is compared is when the last byte would leave, by what was seen: when the store had the first and the last slice, and how
//! long the wire takes for as many bytes. The machine is pure: all of that comes as arguments.

use std::time::Duration;

use crate::limits::{SLICE_BYTES, SLICE_BYTES_MIN, SLICE_PAIRS, SLICE_PAIRS_WON_MIN, SLICE_PAUSE_MAX, SLICE_PAUSE_MIN};

/// Reads of more than half the length of a class's longest are of one class: up to [`SLICE_BYTES_MIN`], up to twice that, and so on
/// to 4 MiB, and all that are longer.
const LENGTHS: usize = 8;

/// A neighbour is better than the length in use if it takes less than this share of the time.
const BETTER: (u64, u64) = (19, 20);

/// Chooses for the reads of one volume on one loop.
#[derive(Debug, Default)]
pub(super) struct Slicing {
    /// By length, and whether others were under way.
    classes: [[Choice; 2]; LENGTHS],
}

/// How a read is cut, for what is [noted](Slicing::note) of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Bytes of a slice, a power of two; the read is told at once if it has no more.
    pub(super) slice_bytes: u64,
    len: u64,
    busy: bool,
}

/// What was seen of a read, from when it was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// The first slice was here.
    pub(super) first: Duration,
    /// The last one was.
    pub(super) last: Duration,
    /// How long the wire takes for a MiB, if anybody knows.
    pub(super) wire: Option<Duration>,
}

/// Which length is in use, and what it is compared with.
#[derive(Clone, Copy, Debug)]
struct Choice {
    /// As a power of two of [`SLICE_BYTES_MIN`].
    used: u32,
    /// Reads until the next comparison, and of the pause after that.
    left: u32,
    pause: u32,
    /// Whether the next neighbour is the shorter one.
    shorter: bool,
    /// Reads that comparisons began.
    turn: u32,
    /// Nanoseconds for a KiB, of the length in use and of its neighbour, until there are both.
    scores: [Option<u64>; 2],
    /// Pairs of a comparison, and those in which the neighbour was better.
    pairs: u32,
    won: u32,
}

impl Default for Choice {
    fn default() -> Self {
        Self {
            used: (SLICE_BYTES / SLICE_BYTES_MIN).ilog2(),
            left: SLICE_PAUSE_MIN,
            pause: SLICE_PAUSE_MIN,
            shorter: true,
            turn: 0,
            scores: [None; 2],
            pairs: 0,
            won: 0,
        }
    }
}

impl Slicing {
    /// How to cut a read of `len` bytes, when `under_way` other requests are under way on the loop.
    pub(super) fn pick(&self, len: u64, under_way: usize) -> Cut {
        let busy = under_way > 0;
        let exponent = self.classes[class(len)][usize::from(busy)].next(len);
        Cut { slice_bytes: SLICE_BYTES_MIN << exponent, len, busy }
    }

    /// The read that was to be cut so has begun: the next one may have its turn.
    pub(super) fn began(&mut self, cut: Cut) {
        let choice = &mut self.classes[class(cut.len)][usize::from(cut.busy)];
        if choice.left == 0 {
            choice.turn = choice.turn.wrapping_add(1);
        }
    }

    /// A read that was cut so went like that.
    pub(super) fn note(&mut self, cut: Cut, seen: Seen) {
        let exponent = (cut.slice_bytes / SLICE_BYTES_MIN).ilog2();
        self.classes[class(cut.len)][usize::from(cut.busy)].note((exponent, cut.len), score(cut, seen));
    }
}

/// Reads of a class have the same slices to choose from.
fn class(len: u64) -> usize {
    (whole(len) as usize).min(LENGTHS - 1)
}

/// The exponent of the shortest slice that holds all of a read.
fn whole(len: u64) -> u32 {
    len.div_ceil(SLICE_BYTES_MIN).next_power_of_two().ilog2()
}

/// Nanoseconds for a KiB, until the last byte would have left.
fn score(cut: Cut, seen: Seen) -> u64 {
    let wire = |bytes: u64| {
        let nanos = seen.wire.map_or(0, |mebibyte| mebibyte.as_nanos()).saturating_mul(bytes.into()) >> 20;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    };
    let after_first = seen.first.saturating_add(wire(cut.len));
    let after_last = seen.last.saturating_add(wire(cut.slice_bytes.min(cut.len)));
    let nanos = u64::try_from(after_first.max(after_last).as_nanos()).unwrap_or(u64::MAX);
    nanos / cut.len.div_ceil(1024).max(1)
}

impl Choice {
    /// What the length in use is compared with, for reads of `len` bytes; `None` if there is nothing to compare.
    fn neighbour(&self, len: u64) -> Option<u32> {
        let used = self.used.min(whole(len));
        let shorter = used.checked_sub(1);
        let longer = (used < whole(len)).then_some(used + 1);
        if self.shorter { shorter.or(longer) } else { longer.or(shorter) }
    }

    /// The turns are those of Thue and Morse (0 1 1 0 1 0 0 1 and so on): as many for either in each two, and in no step with a load
    /// that alternates itself.
    fn next(&self, len: u64) -> u32 {
        let used = self.used.min(whole(len));
        let Some(neighbour) = self.neighbour(len).filter(|_| self.left == 0) else { return used };
        if self.turn.count_ones().is_multiple_of(2) { used } else { neighbour }
    }

    fn note(&mut self, (exponent, len): (u32, u64), score: u64) {
        let Some(neighbour) = self.neighbour(len) else { return };
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        // One that was begun before, with a length that is in question no more, counts for nothing.
        let used = self.used.min(whole(len));
        let Some(of) = [used, neighbour].iter().position(|in_question| *in_question == exponent) else { return };
        self.scores[of] = Some(score);
        if let [Some(used), Some(other)] = self.scores {
            self.scores = [None; 2];
            self.pairs += 1;
            self.won += u32::from(other.saturating_mul(BETTER.1) < used.saturating_mul(BETTER.0));
        }
        if self.pairs == SLICE_PAIRS {
            self.judge(neighbour, neighbour < used);
        }
    }

    fn judge(&mut self, neighbour: u32, shorter: bool) {
        if self.won >= SLICE_PAIRS_WON_MIN {
            (self.used, self.pause, self.shorter) = (neighbour, SLICE_PAUSE_MIN, shorter);
        } else {
            (self.pause, self.shorter) = ((self.pause * 2).min(SLICE_PAUSE_MAX), !shorter);
        }
        (self.left, self.pairs, self.won) = (self.pause, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const KIB: u64 = 1 << 10;

    /// A disk and a wire: microseconds that an operation costs beside its bytes, and that the disk and the wire take for a MiB.
    /// Operations go one after the other.
    #[derive(Clone, Copy)]
    struct Model {
        operation: u64,
        disk: u64,
        wire: Option<u64>,
    }

    impl Model {
        fn read(self, cut: Cut) -> Seen {
            let slice = cut.slice_bytes.min(cut.len);
            // Operations have 256 KiB at most, as the engine's.
            let time = |bytes: u64| {
                Duration::from_micros(bytes.div_ceil(slice.min(256 * KIB)) * self.operation + bytes * self.disk / MIB)
            };
            Seen { first: time(slice), last: time(cut.len), wire: self.wire.map(Duration::from_micros) }
        }
    }

    fn start(slicing: &mut Slicing, len: u64, under_way: usize) -> Cut {
        let cut = slicing.pick(len, under_way);
        slicing.began(cut);
        cut
    }

    /// After so many reads, the length in use.
    fn settled(model: Model, len: u64, under_way: usize) -> u64 {
        let mut slicing = Slicing::default();
        serve(&mut slicing, model, (len, under_way), 4000);
        used(&slicing, len, under_way)
    }

    fn serve(slicing: &mut Slicing, model: Model, (len, under_way): (u64, usize), reads: usize) {
        for _ in 0..reads {
            let cut = start(slicing, len, under_way);
            assert!((SLICE_BYTES_MIN..len * 2).contains(&cut.slice_bytes), "{cut:?}");
            slicing.note(cut, model.read(cut));
        }
    }

    /// Not the neighbour that may be tried just now.
    fn used(slicing: &Slicing, len: u64, under_way: usize) -> u64 {
        SLICE_BYTES_MIN << slicing.classes[class(len)][usize::from(under_way > 0)].used.min(whole(len))
    }

    #[test]
    fn short_slices_are_used_where_operations_cost_nothing_and_the_wire_matters() {
        let model = Model { operation: 0, disk: 1000, wire: Some(1000) };
        assert_eq!(settled(model, MIB, 0), 64 * KIB);
        assert_eq!(settled(model, 8 * MIB, 0), 256 * KIB, "more would gain a fiftieth");
    }

    #[test]
    fn long_slices_are_used_where_operations_are_dear() {
        let model = Model { operation: 400, disk: 100, wire: Some(100) };
        assert_eq!(
            settled(model, MIB, 0),
            256 * KIB,
            "operations are no longer than that, so longer slices gain nothing"
        );
        let mut slicing = Slicing::default();
        // It had learnt otherwise of another disk.
        serve(&mut slicing, Model { operation: 0, disk: 1000, wire: Some(1000) }, (MIB, 0), 4000);
        assert_eq!(used(&slicing, MIB, 0), 64 * KIB);
        serve(&mut slicing, model, (MIB, 0), 40_000);
        assert_eq!(used(&slicing, MIB, 0), 256 * KIB);
    }

    #[test]
    fn a_read_is_whole_where_that_takes_less_and_each_load_has_its_own_length() {
        let mut slicing = Slicing::default();
        // Each slice costs the wire more than it gains: here as the time of the last.
        let busy = |cut: Cut| {
            let last = Duration::from_micros(1000 + 300 * cut.len.div_ceil(cut.slice_bytes));
            Seen { first: last, last, wire: None }
        };
        for _ in 0..4000 {
            let cut = start(&mut slicing, MIB, 15);
            slicing.note(cut, busy(cut));
            let cut = start(&mut slicing, MIB, 0);
            slicing.note(cut, Model { operation: 0, disk: 1000, wire: Some(1000) }.read(cut));
        }
        assert_eq!((used(&slicing, MIB, 15), used(&slicing, MIB, 0)), (MIB, 64 * KIB));
        assert_eq!(used(&slicing, 4 * MIB, 15), 256 * KIB, "of others nothing was learnt");
    }

    #[test]
    fn what_makes_no_difference_is_left_as_it_was_and_asked_ever_less_often() {
        let mut slicing = Slicing::default();
        let mut others = [0; 2];
        for half in &mut others {
            for _ in 0..40_000 {
                let cut = start(&mut slicing, MIB, 0);
                *half += u64::from(cut.slice_bytes != 256 * KIB);
                slicing.note(cut, Seen { first: Duration::ZERO, last: Duration::from_millis(1), wire: None });
            }
        }
        assert_eq!(used(&slicing, MIB, 0), 256 * KIB);
        assert!(others[0] >= 2 * u64::from(SLICE_PAIRS), "both neighbours: {others:?}");
        assert!(others[1] < others[0] && others[1] * 100 < 40_000, "{others:?}");
    }

    #[test]
    fn times_that_spread_by_chance_change_nothing() {
        let (mut slicing, mut random) = (Slicing::default(), byway_fabric::random::Random::from_seed(7));
        for _ in 0..100_000 {
            let cut = start(&mut slicing, MIB, 0);
            let last = Duration::from_micros(500 + random.next_u64() % 1500);
            slicing.note(cut, Seen { first: last / 2, last, wire: None });
            assert_eq!(used(&slicing, MIB, 0), 256 * KIB);
        }
    }

    #[test]
    fn a_load_that_alternates_changes_nothing() {
        let mut slicing = Slicing::default();
        for read in 0..100_000u64 {
            // By turns long and short ones, of which the long ones take less time for each KiB.
            let len = MIB + 4096 + (read % 2) * 900 * KIB;
            let cut = start(&mut slicing, len, 0);
            let last = Duration::from_micros(8000 + 5 * len / KIB);
            slicing.note(cut, Seen { first: last, last, wire: None });
            assert_eq!(used(&slicing, len, 0), 256 * KIB, "read {read}");
        }
    }

    #[test]
    fn what_is_not_begun_takes_no_turn() {
        let mut slicing = Slicing::default();
        serve(&mut slicing, Model { operation: 0, disk: 1000, wire: None }, (MIB, 0), SLICE_PAUSE_MIN as usize);
        let cuts: Vec<u64> = (0..4).map(|_| slicing.pick(MIB, 0).slice_bytes).collect();
        assert_eq!(cuts, [256 * KIB; 4]);
        slicing.began(slicing.pick(MIB, 0));
        assert_eq!(slicing.pick(MIB, 0).slice_bytes, 128 * KIB);
    }

    #[test]
    fn reads_of_any_length_are_cut_and_what_is_seen_of_them_may_be_anything() {
        let mut slicing = Slicing::default();
        for len in [1, 4096, 64 * KIB, 64 * KIB + 1, MIB - 1, MIB + 1, 32 * MIB, u64::MAX >> 20] {
            for took in [Duration::ZERO, Duration::MAX] {
                for _ in 0..200 {
                    let cut = start(&mut slicing, len, 0);
                    assert!(cut.slice_bytes >= SLICE_BYTES_MIN && cut.slice_bytes.is_power_of_two());
                    slicing.note(cut, Seen { first: took, last: took, wire: Some(took) });
                }
            }
        }
    }
}
