//! Fewer examples than features: the weights that a ridge penalty allows are sums of
//! the examples, so the fit has as many unknowns as there are examples, not features.
//!
//! With the rows `X` and the Cholesky factor `L Lᵀ = X Xᵀ`, row `i` of `L` has the
//! same products with all others as row `i` of `X`; weights `u` for `L` are the weights
//! `Xᵀ L⁻ᵀ u` for `X`, of the same length.

use super::fit::{add, dot};

/// A pivot below this share of the largest is that of a row which others already say.
const DEPENDENT: f64 = 1e-10;

/// Rows in as few numbers as there are rows.
pub(super) struct Compact<'a> {
    original: &'a [Vec<f64>],
    /// The factor's rows; none where there are no fewer rows than numbers.
    factor: Option<Vec<Vec<f64>>>,
}

impl<'a> Compact<'a> {
    pub(super) fn new(original: &'a [Vec<f64>]) -> Self {
        let factor = (original.len() < original[0].len()).then(|| cholesky(original));
        Self { original, factor }
    }

    /// What to fit to.
    pub(super) fn rows(&self) -> &[Vec<f64>] {
        self.factor.as_deref().unwrap_or(self.original)
    }

    /// Weights for [`Compact::rows`] as weights for the original ones.
    pub(super) fn expand(&self, weights: &[f64]) -> Vec<f64> {
        let Some(factor) = &self.factor else { return weights.to_vec() };
        // Solves Lᵀ a = u from the last row up.
        let mut shares = weights.to_vec();
        for i in (0..factor.len()).rev() {
            shares[i] = if factor[i][i] > 0.0 { shares[i] / factor[i][i] } else { 0.0 };
            let share = shares[i];
            for (j, entry) in factor[i][..i].iter().enumerate() {
                shares[j] -= entry * share;
            }
        }
        let mut expanded = vec![0.0; self.original[0].len()];
        for (share, row) in shares.iter().zip(self.original) {
            add(&mut expanded, *share, row);
        }
        expanded
    }
}

/// The lower triangular factor of the rows' products, padded with noughts.
fn cholesky(rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let count = rows.len();
    let largest = rows.iter().map(|row| dot(row, row)).fold(0.0, f64::max);
    let mut factor = vec![vec![0.0; count]; count];
    for i in 0..count {
        for j in 0..=i {
            let rest = dot(&rows[i], &rows[j]) - dot(&factor[i][..j], &factor[j][..j]);
            factor[i][j] = if i == j {
                if rest > DEPENDENT * largest { rest.sqrt() } else { 0.0 }
            } else if factor[j][j] > 0.0 {
                rest / factor[j][j]
            } else {
                0.0
            };
        }
    }
    factor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_with_expanded_weights_are_those_with_compact_ones() {
        let row = |seed: u32| -> Vec<f64> {
            (0..9).map(|i| f64::from((seed * 7 + i * i * 3 + seed * i) % 11) - 5.0).collect()
        };
        // The last row says what the first says.
        let mut rows: Vec<Vec<f64>> = (1..5).map(row).collect();
        rows.push(rows[0].clone());
        let compact = Compact::new(&rows);
        assert_eq!(compact.rows().len(), 5);
        assert_eq!(compact.rows()[0].len(), 5);
        // Nothing is along the direction that the last row does not add.
        let weights = [0.3, -1.0, 0.7, 0.1, 0.0];
        let expanded = compact.expand(&weights);
        for (small, large) in compact.rows().iter().zip(&rows) {
            assert!((dot(small, &weights) - dot(large, &expanded)).abs() < 1e-9);
        }
        assert!((dot(&weights, &weights) - dot(&expanded, &expanded)).abs() < 1e-9);
        let tall: Vec<Vec<f64>> = (0..12).map(|i| row(i)[..3].to_vec()).collect();
        assert_eq!(Compact::new(&tall).expand(&[1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]);
    }
}
