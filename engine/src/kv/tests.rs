//! Pages and sequences against a naive model: an arena of tokens in place of
//! keys and values, where every sequence must read back what it was given.

use proptest::prelude::*;

use super::pages::{Chain, Pages, root};
use super::sequence::{PageCopy, Purpose, Sequence};
use forkpoint_kernels::PAGE_TOKENS;

const PAGES: usize = 12;

/// A device whose keys are the tokens themselves.
struct Device {
    arena: Vec<[u32; PAGE_TOKENS]>,
}

impl Device {
    fn copy(&mut self, copy: &PageCopy) {
        let from = self.arena[copy.from.id() as usize];
        self.arena[copy.to as usize][..copy.tokens].copy_from_slice(&from[..copy.tokens]);
    }

    /// What the engine does for a job: reserve, compute, commit.
    fn compute(&mut self, sequence: &mut Sequence, tokens: &[u32]) -> bool {
        if sequence.reserve(tokens.len()).is_err() {
            return false;
        }
        let slots: Vec<_> = sequence.slots(tokens.len()).collect();
        for (slot, &token) in slots.iter().zip(tokens) {
            self.arena[slot.page as usize][slot.offset as usize] = token;
        }
        sequence.commit(tokens);
        true
    }

    fn read(&self, sequence: &Sequence) -> Vec<u32> {
        let pages: Vec<_> = sequence.page_ids().collect();
        (0..sequence.len()).map(|at| self.arena[pages[at / PAGE_TOKENS] as usize][at % PAGE_TOKENS]).collect()
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// Opens a prompt of a tenant, computing it in chunks.
    Open { tenant: u8, tokens: Vec<u32>, chunk: usize },
    /// Adds tokens to a session.
    Append { which: usize, tokens: Vec<u32> },
    /// Forks a session after a share of its tokens.
    Fork { which: usize, share: f64 },
    /// Ends a session, leaving its pages findable or not.
    End { which: usize, retire: bool },
}

fn op() -> impl Strategy<Value = Op> {
    // Few different tokens, so that prompts often begin alike.
    let tokens = |most| prop::collection::vec(0..2u32, 1..most);
    prop_oneof![
        3 => (0..3u8, tokens(80), 1..40usize).prop_map(|(tenant, tokens, chunk)| Op::Open { tenant, tokens, chunk }),
        2 => (any::<usize>(), tokens(40)).prop_map(|(which, tokens)| Op::Append { which, tokens }),
        2 => (any::<usize>(), 0.0..=1.0f64).prop_map(|(which, share)| Op::Fork { which, share }),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(which, retire)| Op::End { which, retire }),
    ]
}

fn run(ops: Vec<Op>) {
    let pages = Pages::new(PAGES);
    let mut device = Device { arena: vec![[u32::MAX; PAGE_TOKENS]; PAGES] };
    // Each session beside what it must hold.
    let mut live: Vec<(Sequence, Vec<u32>)> = Vec::new();
    for op in ops {
        match op {
            Op::Open { tenant, tokens, chunk } => {
                // The third tenant is the server's own study.
                let purpose = if tenant == 2 { Purpose::Study } else { Purpose::Request };
                let mut sequence = Sequence::new(&pages, root(1, &tenant.to_string()), purpose, 0);
                let reused = sequence.reuse(&tokens);
                if let Some(copy) = sequence.reuse_beginning(&tokens[reused..]) {
                    device.copy(&copy);
                }
                // Others may have computed the next page between two chunks.
                let mut fits = true;
                while fits && sequence.len() < tokens.len() {
                    sequence.reuse(&tokens[sequence.len()..]);
                    let rest = &tokens[sequence.len()..];
                    fits = device.compute(&mut sequence, &rest[..rest.len().min(chunk)]);
                }
                if fits {
                    live.push((sequence, tokens));
                }
            }
            Op::Append { which, tokens } if !live.is_empty() => {
                let which = which % live.len();
                let (sequence, expected) = &mut live[which];
                if device.compute(sequence, &tokens) {
                    expected.extend(tokens);
                }
            }
            Op::Fork { which, share } if !live.is_empty() => {
                let (parent, expected) = &live[which % live.len()];
                let at = (parent.len() as f64 * share) as usize;
                if let Ok((child, copy)) = parent.fork(at) {
                    if let Some(copy) = copy {
                        device.copy(&copy);
                    }
                    let expected = expected[..at].to_vec();
                    live.push((child, expected));
                }
            }
            Op::End { which, retire } if !live.is_empty() => {
                let (sequence, _) = live.swap_remove(which % live.len());
                if retire {
                    sequence.retire();
                }
            }
            Op::Append { .. } | Op::Fork { .. } | Op::End { .. } => {}
        }
        pages.check();
        for (sequence, expected) in &live {
            assert_eq!(sequence.tokens(), expected);
            assert_eq!(
                &device.read(sequence),
                expected,
                "a session reads back other tokens than it was given"
            );
        }
    }
    drop(live);
    pages.check();
    let census = pages.census();
    assert_eq!((census.held, census.free + census.cached), (0, PAGES));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn every_session_reads_back_its_tokens(ops in prop::collection::vec(op(), 1..60)) {
        run(ops);
    }
}

fn request(pages: &Pages, root: Chain) -> Sequence {
    Sequence::new(pages, root, Purpose::Request, 0)
}

fn sequence(pages: &Pages, device: &mut Device, tokens: &[u32]) -> (Sequence, usize) {
    let mut sequence = request(pages, root(1, ""));
    let reused = sequence.reuse(tokens);
    if let Some(copy) = sequence.reuse_beginning(&tokens[reused..]) {
        device.copy(&copy);
    }
    let reused = sequence.len();
    assert!(device.compute(&mut sequence, &tokens[reused..]));
    (sequence, reused)
}

fn setting() -> (Pages, Device) {
    (Pages::new(PAGES), Device { arena: vec![[0; PAGE_TOKENS]; PAGES] })
}

#[test]
fn the_same_prompt_again_computes_nothing() {
    let (pages, mut device) = setting();
    let prompt: Vec<u32> = (0..40).collect();
    let (first, reused) = sequence(&pages, &mut device, &prompt);
    assert_eq!(reused, 0);
    // While the first lives, its unfilled page is its own.
    let (second, reused) = sequence(&pages, &mut device, &prompt);
    assert_eq!(reused, 32);
    second.retire();
    first.retire();
    assert_eq!(sequence(&pages, &mut device, &prompt).1, 40);
}

#[test]
fn a_tail_gives_way_to_the_page_that_someone_else_filled() {
    let (pages, mut device) = setting();
    let prompt: Vec<u32> = (0..40).collect();
    let mut slow = request(&pages, root(1, ""));
    assert!(device.compute(&mut slow, &prompt[..20]));
    let (fast, _) = sequence(&pages, &mut device, &prompt);
    assert!(slow.next_chain(&prompt[20..]).is_some());
    assert_eq!(slow.reuse(&prompt[20..]), 12);
    assert_eq!(slow.page_ids().collect::<Vec<_>>(), fast.page_ids().take(2).collect::<Vec<_>>());
    assert_eq!(device.read(&slow), &prompt[..32]);
    assert_eq!(slow.next_chain(&prompt[32..]), None, "the last page stays unfilled");
}

#[test]
fn tenants_share_no_page() {
    let (pages, mut device) = setting();
    let prompt: Vec<u32> = (0..32).collect();
    sequence(&pages, &mut device, &prompt).0.retire();
    let mut other = request(&pages, root(1, "other"));
    assert_eq!(other.reuse(&prompt), 0);
    assert_eq!(request(&pages, root(2, "")).reuse(&prompt), 0, "nor do models");
}

#[test]
fn a_study_shares_its_pages_while_it_lasts_and_leaves_none() {
    let (pages, mut device) = setting();
    let prompt: Vec<u32> = (0..40).collect();
    let mut study = || {
        let mut study = Sequence::new(&pages, root(1, "study"), Purpose::Study, 0);
        let reused = study.reuse(&prompt);
        assert!(device.compute(&mut study, &prompt[reused..]));
        (study, reused)
    };
    let (first, second) = (study(), study());
    assert_eq!((first.1, second.1), (0, 32));
    first.0.retire();
    second.0.retire();
    let census = pages.census();
    assert_eq!((census.held, census.cached, census.free), (0, 0, PAGES));
    assert_eq!(study().1, 0);
}

#[test]
fn a_fork_copies_its_tail_alone() {
    let (pages, mut device) = setting();
    let (parent, _) = sequence(&pages, &mut device, &(0..40).collect::<Vec<_>>());
    let held = pages.census().held;
    let (child, copy) = parent.fork(40).unwrap();
    assert_eq!(copy.map(|copy| copy.tokens), Some(8));
    assert_eq!(pages.census().held, held + 1);
    let shared: Vec<_> = parent.page_ids().zip(child.page_ids()).map(|(a, b)| a == b).collect();
    assert_eq!(shared, [true, true, false]);
    assert_eq!(parent.fork(32).unwrap().1.map(|copy| copy.tokens), None, "at a boundary nothing is copied");
}

#[test]
fn two_that_computed_the_same_page_keep_one() {
    let (pages, mut device) = setting();
    let mut twins = [request(&pages, root(1, "")), request(&pages, root(1, ""))];
    let prompt: Vec<u32> = (0..16).collect();
    for twin in &mut twins {
        assert!(device.compute(twin, &prompt));
    }
    assert_eq!(pages.census().held, 1);
    assert_eq!(twins[0].page_ids().collect::<Vec<_>>(), twins[1].page_ids().collect::<Vec<_>>());
}

#[test]
fn the_longest_unused_page_goes_first_and_a_full_arena_says_so() {
    let (pages, mut device) = setting();
    let old: Vec<u32> = (0..64).collect();
    let new: Vec<u32> = (100..164).collect();
    sequence(&pages, &mut device, &old).0.retire();
    sequence(&pages, &mut device, &new).0.retire();
    let (held, _) = sequence(&pages, &mut device, &(200..280).collect::<Vec<_>>());
    assert_eq!(pages.census().evictions, 1);
    // The end of the old prompt went, its beginning stayed.
    assert_eq!(sequence(&pages, &mut device, &new).1, 64);
    assert_eq!(request(&pages, root(1, "")).reuse(&old), 48);
    let mut greedy = request(&pages, root(1, ""));
    assert!(greedy.reserve(PAGES * PAGE_TOKENS).is_err());
    assert_eq!(greedy.page_ids().count(), 0, "all of the room or none");
    drop(held);
}
