//! Statistics that sum up many measurements.

/// The middle value; of an even number the mean of the middle two. 0 of none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let medians = [&[][..], &[3.0], &[9.0, 1.0, 2.0], &[9.0, 1.0, 2.0, 4.0]].map(median);
        assert_eq!(medians.map(f64::to_bits), [0.0_f64, 3.0, 2.0, 3.0].map(f64::to_bits));
    }
}
