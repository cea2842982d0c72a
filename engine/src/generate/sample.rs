//! Choosing the next token.

use std::collections::HashSet;

use rand::{RngExt, SeedableRng, rngs::ChaCha8Rng};

use super::Sampling;

/// A token that was chosen, and what else could have been.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    pub(crate) token: u32,
    /// ln p over the whole vocabulary, before temperature and penalties.
    pub(crate) logprob: f32,
    /// The likeliest tokens, as many as were asked for.
    pub(crate) top: Vec<(u32, f32)>,
}

/// The state of one reply's sampling.
#[derive(Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
    /// Tokens of the session and the reply, where a penalty needs them.
    seen: HashSet<u32>,
    logits: Vec<f32>,
    candidates: Vec<(u32, f32)>,
}

impl Sampler {
    /// `seed` is used when the sampling names none.
    pub(crate) fn new(sampling: Sampling, seed: u64, session: &[u32]) -> Self {
        let rng = ChaCha8Rng::seed_from_u64(sampling.seed.unwrap_or(seed));
        let penalised = sampling.repetition_penalty != 1.0;
        let seen = if penalised { session.iter().copied().collect() } else { HashSet::new() };
        Self { sampling, rng, seen, logits: Vec::new(), candidates: Vec::new() }
    }

    /// Chooses a token by its logits over the vocabulary.
    pub(crate) fn sample(&mut self, logits: &[f32]) -> Choice {
        let token = self.choose(logits);
        if self.sampling.repetition_penalty != 1.0 {
            self.seen.insert(token);
        }
        let Some(count) = self.sampling.logprobs else {
            return Choice { token, logprob: 0.0, top: Vec::new() };
        };
        let normaliser = log_sum_exp(logits);
        let logprob = |token: u32| logits[token as usize] - normaliser;
        let top = top(logits, usize::from(count)).into_iter().map(|(t, _)| (t, logprob(t))).collect();
        Choice { token, logprob: logprob(token), top }
    }

    fn choose(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_p, top_k, min_p, repetition_penalty: penalty, .. } = self.sampling;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        for &token in &self.seen {
            if let Some(logit) = self.logits.get_mut(token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        if temperature == 0.0 {
            return argmax(&self.logits);
        }
        // Weights relative to the likeliest.
        let best = self.logits[argmax(&self.logits) as usize];
        let floor = f32::MIN_POSITIVE.max(min_p);
        self.candidates.clear();
        self.candidates.extend((0u32..).zip(&self.logits).filter_map(|(token, logit)| {
            let weight = ((logit - best) / temperature).exp();
            (weight >= floor).then_some((token, weight))
        }));
        if top_k > 0 {
            keep_largest(&mut self.candidates, top_k as usize);
        }
        if top_p < 1.0 {
            keep_share(&mut self.candidates, f64::from(top_p));
        }
        let Some(&(last, _)) = self.candidates.last() else {
            // Logits that are no numbers have no likeliest.
            return argmax(&self.logits);
        };
        let mut left = self.rng.random::<f64>() * total(&self.candidates);
        for &(token, weight) in &self.candidates {
            left -= f64::from(weight);
            if left < 0.0 {
                return token;
            }
        }
        last
    }
}

/// The first of the largest.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

fn log_sum_exp(logits: &[f32]) -> f32 {
    let top = logits[argmax(logits) as usize];
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - top).exp()).sum();
    top + sum.ln() as f32
}

/// Largest first; ties by token.
fn descending(a: &(u32, f32), b: &(u32, f32)) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Leaves the `count` largest, largest first, without sorting the others.
fn keep_largest(candidates: &mut Vec<(u32, f32)>, count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count, descending);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(descending);
}

/// Leaves the largest that together have this share of all weights, at least one,
/// largest first.
fn keep_share(candidates: &mut Vec<(u32, f32)>, share: f64) {
    let wanted = share * total(candidates);
    // How many they are is known when they are found: looked for among a few, then among more.
    let mut among = 64;
    loop {
        let whole = among >= candidates.len();
        if !whole {
            candidates.select_nth_unstable_by(among, descending);
        }
        let most = among.min(candidates.len());
        candidates[..most].sort_unstable_by(descending);
        let mut sum = 0.0;
        let kept = candidates[..most].iter().take_while(|&&(_, weight)| {
            let reached = sum >= wanted;
            sum += f64::from(weight);
            !reached
        });
        let kept = kept.count().max(1);
        if kept < most || whole {
            candidates.truncate(kept);
            return;
        }
        among *= 8;
    }
}

fn total(candidates: &[(u32, f32)]) -> f64 {
    candidates.iter().map(|&(_, weight)| f64::from(weight)).sum()
}

/// The `count` largest, largest first; ties by token.
fn top(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    keep_largest(&mut all, count);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, 0.0];

    fn draw(sampling: Sampling) -> Vec<u32> {
        let mut sampler = Sampler::new(sampling, 1, &[]);
        (0..2000).map(|_| sampler.sample(&LOGITS).token).collect()
    }

    fn share(tokens: &[u32], token: u32) -> f64 {
        tokens.iter().filter(|&&t| t == token).count() as f64 / tokens.len() as f64
    }

    #[test]
    fn nought_temperature_takes_the_likeliest() {
        assert!(draw(Sampling { temperature: 0.0, ..Sampling::default() }).iter().all(|&t| t == 1));
    }

    #[test]
    fn draws_follow_the_softmax() {
        let tokens = draw(Sampling::default());
        // exp(0, -1, -2, -3) normalised: .644, .237, .087, .032.
        assert!((share(&tokens, 1) - 0.644).abs() < 0.04, "{}", share(&tokens, 1));
        assert!((share(&tokens, 2) - 0.237).abs() < 0.04);
        assert!(share(&tokens, 3) > 0.01);
    }

    #[test]
    fn each_bound_keeps_the_likeliest_only() {
        let kept = |sampling: Sampling| {
            let mut tokens = draw(sampling);
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        assert_eq!(kept(Sampling { top_k: 2, ..Sampling::default() }), [1, 2]);
        assert_eq!(kept(Sampling { top_p: 0.7, ..Sampling::default() }), [1, 2]);
        assert_eq!(kept(Sampling { top_p: 0.0, ..Sampling::default() }), [1]);
        assert_eq!(kept(Sampling { min_p: 0.1, ..Sampling::default() }), [0, 1, 2]);
        assert_eq!(kept(Sampling::default()), [0, 1, 2, 3]);
    }

    #[test]
    fn bounds_keep_of_many_what_sorting_all_would() {
        // Some of them equal.
        let all: Vec<(u32, f32)> =
            (0..3000).map(|token| (token, (token * 7919 % 2801) as f32 / 2801.0 + 1e-6)).collect();
        let mut sorted = all.clone();
        sorted.sort_unstable_by(descending);
        for count in [1, 63, 64, 65, 2999, 3000, 5000] {
            let mut kept = all.clone();
            keep_largest(&mut kept, count);
            assert_eq!(kept, sorted[..count.min(3000)], "{count}");
        }
        for share in [0.0, 1e-3, 0.04, 0.3, 0.9, 0.9999] {
            let mut kept = all.clone();
            keep_share(&mut kept, share);
            let sum = |count: usize| total(&sorted[..count]);
            assert_eq!(kept, sorted[..kept.len()], "{share}");
            assert!(sum(kept.len()) >= share * total(&all), "{share}");
            assert!(kept.len() == 1 || sum(kept.len() - 1) < share * total(&all), "{share}");
        }
    }

    #[test]
    fn a_penalty_moves_what_was_seen() {
        let sampling = Sampling { temperature: 0.0, repetition_penalty: 2.0, ..Sampling::default() };
        let mut sampler = Sampler::new(sampling, 1, &[1]);
        let drawn: Vec<u32> = (0..3).map(|_| sampler.sample(&LOGITS).token).collect();
        // 3/2 < 2, then 2/2 <= 3/2.
        assert_eq!(drawn, [2, 1, 1]);
    }

    #[test]
    fn logits_that_are_no_numbers_give_some_token() {
        for temperature in [0.0, 1.0] {
            let mut sampler = Sampler::new(Sampling { temperature, ..Sampling::default() }, 1, &[]);
            assert!(sampler.sample(&[f32::NAN; 4]).token < 4);
        }
    }

    #[test]
    fn a_seed_repeats_the_reply() {
        let seeded = |seed| draw(Sampling { seed: Some(seed), ..Sampling::default() });
        assert_eq!(seeded(7), seeded(7));
        assert_ne!(seeded(7), seeded(8));
    }

    #[test]
    fn logprobs_are_over_the_vocabulary() {
        let sampling = Sampling { temperature: 0.0, logprobs: Some(2), ..Sampling::default() };
        let choice = Sampler::new(sampling, 1, &[]).sample(&LOGITS);
        assert!((choice.logprob.exp() - 0.644).abs() < 1e-3);
        let tokens: Vec<u32> = choice.top.iter().map(|&(token, _)| token).collect();
        assert_eq!(tokens, [1, 2]);
        assert_eq!(choice.top[0].1, choice.logprob);
    }
}
