//! Sizes and times as people write them: `64K`, `1G`, `10ms`. Suffixes are binary: K is 1024.

use std::time::Duration;

/// Why a text is no size or time. Says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnitError {
    /// Not digits and a known suffix.
    #[error("invalid size `{0}`; write bytes with an optional K, M, G or T (binary), for example 4096, 64K or 10G")]
    Size(String),
    /// Over 2^64.
    #[error("`{0}` is too large; sizes go up to 16777215T")]
    SizeTooLarge(String),
    /// Not digits and a known suffix.
    #[error("invalid time `{0}`; write a number with us, ms or s, for example 500us, 10ms or 2s")]
    Time(String),
}

const SUFFIXES: [(&str, u32); 4] = [("T", 40), ("G", 30), ("M", 20), ("K", 10)];

/// Reads a size in bytes: digits, then nothing or one of `K M G T`, in either case, with an optional `iB`.
///
/// # Errors
/// When it is something else, or over 64 bits.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, suffix) = text.split_at(end);
    let letter = suffix.strip_suffix("iB").unwrap_or(suffix);
    let shift = if suffix.is_empty() {
        0
    } else {
        let known = SUFFIXES.iter().find(|(name, _)| name.eq_ignore_ascii_case(letter));
        known.ok_or_else(|| UnitError::Size(text.to_owned()))?.1
    };
    if digits.is_empty() {
        return Err(UnitError::Size(text.to_owned()));
    }
    let too_large = || UnitError::SizeTooLarge(text.to_owned());
    let number: u64 = digits.parse().map_err(|_| too_large())?;
    number.checked_mul(1 << shift).ok_or_else(too_large)
}

/// Writes a size so that [`parse_size`] reads it back exactly.
pub fn format_size(bytes: u64) -> String {
    match SUFFIXES.iter().find(|(_, shift)| bytes > 0 && bytes.trailing_zeros() >= *shift) {
        Some((suffix, shift)) => format!("{}{suffix}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// Writes a size for people to read, rounded: `1.5 GiB`.
pub fn show_size(bytes: u64) -> String {
    match SUFFIXES.iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((suffix, shift)) => format!("{:.1} {suffix}iB", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

/// Reads a time: digits, then `us`, `ms` or `s`.
///
/// # Errors
/// When it is something else.
pub fn parse_time(text: &str) -> Result<Duration, UnitError> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let number = digits.parse::<u64>().map_err(|_| UnitError::Time(text.to_owned()))?;
    match unit {
        "us" => Ok(Duration::from_micros(number)),
        "ms" => Ok(Duration::from_millis(number)),
        "s" => Ok(Duration::from_secs(number)),
        _ => Err(UnitError::Time(text.to_owned())),
    }
}

/// Writes a time, rounded down to microseconds, so that [`parse_time`] reads it back.
pub fn format_time(time: Duration) -> String {
    let micros = time.as_micros();
    if micros.is_multiple_of(1_000_000) {
        format!("{}s", micros / 1_000_000)
    } else if micros.is_multiple_of(1000) {
        format!("{}ms", micros / 1000)
    } else {
        format!("{micros}us")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_binary() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("64k"), Ok(65536));
        assert_eq!(parse_size("1GiB"), Ok(1 << 30));
        assert_eq!(parse_size("16777215T"), Ok(16_777_215 << 40));
    }

    #[test]
    fn what_is_no_size_is_refused_with_an_example() {
        for bad in ["", "K", "1.5G", "64KB", "1 G", "-1", "0x10", "iB", "1iB"] {
            let error = parse_size(bad).unwrap_err();
            assert_eq!(error, UnitError::Size(bad.to_owned()));
            assert!(error.to_string().contains("for example"));
        }
        assert!(matches!(parse_size("16777216T"), Err(UnitError::SizeTooLarge(_))));
        assert!(matches!(parse_size("99999999999999999999"), Err(UnitError::SizeTooLarge(_))));
    }

    proptest! {
        #[test]
        fn a_size_reads_back(bytes: u64, shift in 0u32..50) {
            let bytes = bytes >> shift << shift;
            prop_assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
        }

        #[test]
        fn a_time_reads_back(micros in 0u64..u64::MAX / 1_000_000, scale in prop::sample::select(vec![1u64, 1000, 1_000_000])) {
            let time = Duration::from_micros(micros / scale * scale);
            prop_assert_eq!(parse_time(&format_time(time)), Ok(time));
        }
    }
}
