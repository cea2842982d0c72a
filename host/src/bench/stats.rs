//! What is said of a handful of numbers.

/// A sample's middle and spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Summary {
    pub(super) median: f64,
    /// The first and third quartile.
    pub(super) quartiles: (f64, f64),
    pub(super) min: f64,
    pub(super) max: f64,
    pub(super) count: usize,
}

impl Summary {
    /// Nothing for no numbers.
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        Some(Self {
            median: quantile(&sorted, 0.5),
            quartiles: (quantile(&sorted, 0.25), quantile(&sorted, 0.75)),
            min,
            max,
            count: sorted.len(),
        })
    }

    /// What a table shows beside the median: the quartiles, or all of the range where four or fewer make none.
    pub(super) fn spread(&self) -> (f64, f64) {
        if self.count > 4 { self.quartiles } else { (self.min, self.max) }
    }
}

/// The quantile `q` of sorted numbers, between two of them in proportion (Hyndman and Fan 1996, type 7).
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = q * last as f64;
    let (below, part) = (at.floor() as usize, at.fract());
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * part
}

/// How many times better `ours` is than `theirs`, pair by pair.
pub(super) fn ratios(ours: &[f64], theirs: &[f64], higher_is_better: bool) -> Vec<f64> {
    let pairs = ours.iter().zip(theirs);
    pairs.map(|(ours, theirs)| if higher_is_better { ours / theirs } else { theirs / ours }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_and_the_spread() {
        let five = Summary::of(&[5.0, 1.0, 2.0, 4.0, 3.0]).unwrap();
        assert_eq!((five.median, five.quartiles, five.min, five.max), (3.0, (2.0, 4.0), 1.0, 5.0));
        assert_eq!(five.spread(), (2.0, 4.0));
        let two = Summary::of(&[1.0, 2.0]).unwrap();
        assert_eq!((two.median, two.spread()), (1.5, (1.0, 2.0)));
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(quantile(&[7.0], 0.99), 7.0);
    }

    #[test]
    fn a_ratio_above_one_is_better_whichever_way_the_unit_goes() {
        assert_eq!(ratios(&[10.0, 8.0], &[5.0, 2.0], true), [2.0, 4.0]);
        assert_eq!(ratios(&[10.0, 8.0], &[5.0, 2.0], false), [0.5, 0.25]);
    }
}
