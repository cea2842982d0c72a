//! How near a session lies to a probe's examples.
//!
//! The examples' few main directions are taken out; what is left of a session's
//! features is how unlike them it is. The distance is turned into a number like a
//! probability by those of examples that were left out of the fit.

use super::fit::{add, dot};

/// Directions that are taken out.
pub(super) const DIRECTIONS: usize = 4;
/// Rounds of the search for them: they need not be exact, only the same each time.
const ROUNDS: usize = 20;
/// The nearness of the median example, and of one farther off than 19 of 20.
const MEDIAN: f64 = 0.9;

/// The main directions of standardised rows, orthonormal: subspace iteration from a
/// fixed start.
pub(super) fn directions(rows: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let width = rows[0].len();
    let count = DIRECTIONS.min(rows.len().saturating_sub(1)).min(width);
    // The first rows are a start as good as any, and not random.
    let mut basis: Vec<Vec<f64>> = (0..count).map(|i| rows[i * rows.len() / count].clone()).collect();
    orthonormalize(&mut basis);
    for _ in 0..ROUNDS {
        for direction in &mut basis {
            let mut next = vec![0.0; width];
            for row in rows {
                add(&mut next, dot(row, direction), row);
            }
            *direction = next;
        }
        orthonormalize(&mut basis);
    }
    basis
}

/// Gram and Schmidt's; what depends on others is dropped.
fn orthonormalize(basis: &mut Vec<Vec<f64>>) {
    let mut done: Vec<Vec<f64>> = Vec::with_capacity(basis.len());
    for mut direction in basis.drain(..) {
        let before = dot(&direction, &direction).sqrt();
        for other in &done {
            let along = dot(other, &direction);
            add(&mut direction, -along, other);
        }
        let length = dot(&direction, &direction).sqrt();
        if length > 1e-9 * before.max(1e-300) {
            direction.iter_mut().for_each(|x| *x /= length);
            done.push(direction);
        }
    }
    *basis = done;
}

/// The mean square of what is left of a row without the directions.
pub(super) fn distance(row: &[f64], directions: &[Vec<f64>]) -> f64 {
    let within: f64 = directions.iter().map(|direction| dot(direction, row).powi(2)).sum();
    ((dot(row, row) - within) / row.len() as f64).max(0.0)
}

/// Turns distances into nearness, from 1 to 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Nearness {
    /// The distance at which it is one half.
    pub(super) half: f64,
    /// How much farther brings it from one half to a quarter or so.
    pub(super) spread: f64,
}

impl Nearness {
    /// From distances of examples that were left out.
    pub(super) fn of(mut distances: Vec<f64>) -> Self {
        distances.sort_by(f64::total_cmp);
        let at = |share: f64| distances[((distances.len() - 1) as f64 * share).round() as usize];
        let (median, half) = (at(0.5), at(0.95));
        let spread = (half - median) / (MEDIAN / (1.0 - MEDIAN)).ln();
        Self { half, spread: spread.max(1e-6 * half.max(1e-6)) }
    }

    pub(super) fn at(self, distance: f64) -> f64 {
        1.0 / (1.0 + ((distance - self.half) / self.spread).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_examples_vary_in_is_near_and_what_they_never_did_is_far() {
        // Two directions that vary much, eight others hardly.
        let row = |a: f64, b: f64, rest: f64| {
            let mut row = vec![rest; 10];
            (row[0], row[1]) = (a, b);
            row
        };
        let rows: Vec<_> = (0..40)
            .map(|i| row(f64::from(i % 7) - 3.0, f64::from(i % 5) - 2.0, 0.1 * (f64::from(i % 3) - 1.0)))
            .collect();
        let found = directions(&rows);
        assert_eq!(found.len(), 3, "there are no more");
        let near = distance(&row(5.0, -4.0, 0.0), &found);
        let mut odd = row(0.0, 0.0, 0.0);
        (odd[4], odd[5]) = (3.0, -3.0);
        assert!(near < 0.1 && distance(&odd, &found) > 1.0, "{near} {}", distance(&odd, &found));
    }

    #[test]
    fn nearness_falls_from_the_examples_outwards() {
        let nearness = Nearness::of((1..=100).map(f64::from).collect());
        assert!((nearness.at(50.0) - 0.9).abs() < 0.01 && (nearness.at(95.0) - 0.5).abs() < 0.02);
        assert!(nearness.at(1.0) > 0.97 && nearness.at(300.0) < 0.001);
        let alike = Nearness::of(vec![2.0; 9]);
        assert!(alike.at(1.0) > 0.99 && alike.at(3.0) < 0.01 && alike.at(2.0) == 0.5);
    }
}
