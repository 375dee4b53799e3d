//! Names that a program has given to parts of its shared memory, for the job's report.

use std::ops::Range;

use crate::limits::{NAME_BYTES_MAX, NAMES_MAX};

/// A part of shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    /// Addresses.
    bytes: Range<usize>,
    name: String,
}

/// Names of parts: the first [`NAMES_MAX`] that are given.
#[derive(Debug, Default)]
pub(crate) struct Names {
    parts: Vec<Part>,
}

impl Names {
    /// Names the bytes at these addresses. Of a long name the end is kept, where a path has its file.
    pub(crate) fn add(&mut self, bytes: Range<usize>, name: &str) {
        let first = name.len().saturating_sub(NAME_BYTES_MAX);
        let first = (first..=name.len()).find(|at| name.is_char_boundary(*at)).unwrap_or(0);
        let part = Part { bytes, name: name[first..].to_owned() };
        if self.parts.len() < NAMES_MAX && !part.bytes.is_empty() && !self.parts.contains(&part) {
            self.parts.push(part);
        }
    }

    /// The names of what lies at these addresses, each once.
    pub(crate) fn of(&self, bytes: &Range<usize>) -> Vec<&str> {
        let has = |part: &&Part| part.bytes.start < bytes.end && bytes.start < part.bytes.end;
        let mut names: Vec<&str> = self.parts.iter().filter(has).map(|part| part.name.as_str()).collect();
        names.dedup();
        names
    }

    /// Each part as numbers, as a line of a report has them: its first address, its length, and the bytes of its name.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = Vec<u64>> {
        self.parts.iter().map(|Part { bytes, name }| {
            [bytes.start as u64, bytes.len() as u64].into_iter().chain(name.bytes().map(u64::from)).collect()
        })
    }

    /// Takes numbers that another process's names gave; `None` if they are none.
    pub(crate) fn add_numbers(&mut self, numbers: &[u64]) -> Option<()> {
        let [first, length, name @ ..] = numbers else { return None };
        let name: Vec<u8> = name.iter().map(|byte| u8::try_from(*byte)).collect::<Result<_, _>>().ok()?;
        let first = usize::try_from(*first).ok()?;
        let end = first.checked_add(usize::try_from(*length).ok()?)?;
        self.add(first..end, &String::from_utf8(name).ok()?);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back_from_their_numbers_and_are_bounded() {
        let (mut names, mut other) = (Names::default(), Names::default());
        names.add(100..200, "grid");
        names.add(150..300, "row");
        names.add(100..200, "grid");
        names.add(400..400, "nothing");
        for numbers in names.numbers() {
            other.add_numbers(&numbers).unwrap();
        }
        assert_eq!(other.of(&(0..101)), ["grid"]);
        assert_eq!(other.of(&(199..200)), ["grid", "row"]);
        assert!(other.of(&(300..500)).is_empty());
        assert_eq!(other.add_numbers(&[1]), None);
        assert_eq!(other.add_numbers(&[1, 1, 256]), None, "no byte");
        assert_eq!(other.add_numbers(&[u64::MAX, 2, 65]), None, "beyond the last address");

        let long = format!("{}ä/end.c:7", "x".repeat(NAME_BYTES_MAX));
        names.add(500..501, &long);
        let kept = names.of(&(500..501))[0];
        assert!(kept.len() <= NAME_BYTES_MAX && kept.ends_with("ä/end.c:7"), "{kept}");
        for at in 0..2 * NAMES_MAX {
            names.add(1000 + at..1001 + at, "more");
        }
        assert_eq!(names.parts.len(), NAMES_MAX);
    }
}
