//! Sessions on an arena, for the tests of attention.
#![allow(unreachable_pub, reason = "each test file is a crate")]

use forkpoint_kernels::{
    Attention, AttentionBatch, Backend, Group, KvPrecision, KvShape, PAGE_TOKENS, PageId, Slot, Span,
    cpu::{Cpu, Kv, Path},
};
use half::bf16;

use crate::support::{Random, all, rows, store};

/// Heads and window of one layer, and where it stands.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub window: Option<u32>,
    pub precision: KvPrecision,
}

/// What lies in an arena's pages where no token was written.
#[derive(Debug, Clone, Copy)]
pub enum Garbage {
    Zeros,
    Huge,
    NotANumber,
}

/// A session: its tokens' queries, keys and values, and its pages.
#[derive(Debug, Clone)]
pub struct Session {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub pages: Vec<PageId>,
}

/// A processor with an arena of two layers, of which the tests use the second.
pub struct Bench {
    pub cpu: Cpu,
    pub kv: Kv,
    pub shape: Shape,
    free: Vec<PageId>,
    random: Random,
}

pub const LAYER: usize = 1;

impl Bench {
    pub fn new(path: Path, threads: usize, shape: Shape, garbage: Garbage) -> Self {
        let mut cpu = Cpu::with_path(path, threads).unwrap();
        let pages = 400;
        let (heads, head_dim) = (shape.kv_heads, shape.head_dim);
        let mut kv =
            cpu.kv(KvShape { layers: 2, heads, head_dim, pages, precision: shape.precision }).unwrap();
        let bad = match garbage {
            Garbage::Zeros => 0.0,
            Garbage::Huge => bf16::MAX.to_f32(),
            Garbage::NotANumber => f32::NAN,
        };
        let dirty = rows(&mut cpu, &vec![bad; PAGE_TOKENS * heads * head_dim], heads * head_dim);
        for page in 0..pages as PageId {
            let slots: Vec<Slot> = (0..PAGE_TOKENS as u32).map(|offset| Slot { page, offset }).collect();
            store(&mut cpu, &mut kv, LAYER, &dirty, &dirty, &slots);
        }
        let mut random = Random(17);
        let mut free: Vec<PageId> = (0..pages as PageId).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, random.below(i + 1));
        }
        Self { cpu, kv, shape, free, random }
    }

    fn widths(&self) -> (usize, usize) {
        (self.shape.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim)
    }

    pub fn session(&mut self, tokens: usize) -> Session {
        let mut session = Session { q: vec![], k: vec![], v: vec![], pages: vec![] };
        self.extend(&mut session, tokens);
        session
    }

    /// A child that shares the parent's full pages, with `tokens` of its own.
    pub fn fork(&mut self, parent: &Session, tokens: usize) -> Session {
        let mut child = parent.clone();
        let length = self.tokens(parent);
        let partial = length % PAGE_TOKENS;
        if partial > 0 {
            let page = self.free.pop().unwrap();
            let old = std::mem::replace(child.pages.last_mut().unwrap(), page);
            self.cpu.copy_page(&mut self.kv, old, page, partial);
        }
        self.extend(&mut child, tokens);
        child
    }

    pub fn tokens(&self, session: &Session) -> usize {
        session.q.len() / self.widths().0
    }

    fn extend(&mut self, session: &mut Session, tokens: usize) {
        let (wide, narrow) = self.widths();
        let start = self.tokens(session);
        session.q.extend(self.random.activations(tokens * wide).iter().map(|v| v * 1.5));
        session.k.extend(self.random.activations(tokens * narrow));
        session.v.extend(self.random.activations(tokens * narrow));
        let end = start + tokens;
        while session.pages.len() * PAGE_TOKENS < end {
            session.pages.push(self.free.pop().unwrap());
        }
        let slots: Vec<Slot> = (start..end)
            .map(|p| Slot { page: session.pages[p / PAGE_TOKENS], offset: (p % PAGE_TOKENS) as u32 })
            .collect();
        let k = rows(&mut self.cpu, &session.k[start * narrow..], narrow);
        let v = rows(&mut self.cpu, &session.v[start * narrow..], narrow);
        store(&mut self.cpu, &mut self.kv, LAYER, &k, &v, &slots);
    }

    pub fn attention(&self) -> Attention {
        let scale = 1.0 / (self.shape.head_dim as f32).sqrt();
        Attention { heads: self.shape.heads, scale, window: self.shape.window }
    }

    /// Attention of `tokens[i]` of session `i`; groups are counts of sessions
    /// and the pages that they share.
    pub fn attend(
        &mut self,
        sessions: &[(&Session, std::ops::Range<usize>)],
        groups: &[(usize, usize)],
    ) -> Vec<Vec<f32>> {
        let (wide, _) = self.widths();
        let (mut spans, mut table, mut q) = (vec![], vec![], vec![]);
        for (session, tokens) in sessions {
            spans.push(Span {
                row: (q.len() / wide) as u32,
                rows: tokens.len() as u32,
                position: tokens.start as u32,
                pages: table.len() as u32,
            });
            q.extend(&session.q[tokens.start * wide..tokens.end * wide]);
            table.extend(&session.pages[..tokens.end.div_ceil(PAGE_TOKENS)]);
        }
        let mut span = 0;
        let groups: Vec<Group> = groups
            .iter()
            .map(|&(spans, shared)| {
                span += spans;
                Group { span: (span - spans) as u32, spans: spans as u32, shared: shared as u32 }
            })
            .collect();
        let q = rows(&mut self.cpu, &q, wide);
        let mut out = self.cpu.rows(q.len(), wide);
        let batch = AttentionBatch { groups: &groups, spans: &spans, table: &table };
        let attention = self.attention();
        self.cpu.attend(&attention, &q, &self.kv, LAYER, batch, &mut out);
        let out = all(&self.cpu, &out);
        spans.iter().map(|s| out[s.row as usize * wide..(s.row + s.rows) as usize * wide].to_vec()).collect()
    }

    /// The same of one token, in f64 from the keys and values as the arena keeps
    /// them; and by how much f32 may miss each number.
    pub fn exact(&self, session: &Session, token: usize) -> Vec<(f64, f64)> {
        let (wide, narrow) = self.widths();
        let dim = self.shape.head_dim;
        let scale = f64::from(self.attention().scale);
        let first = self.shape.window.map_or(0, |w| (token + 1).saturating_sub(w as usize));
        let mut out = vec![(0.0, 0.0); wide];
        for head in 0..self.shape.heads {
            let kv_head = head * self.shape.kv_heads / self.shape.heads;
            let at = |key: usize| key * narrow + kv_head * dim;
            let q = &session.q[token * wide + head * dim..][..dim];
            // A score, and the size of the terms that it is the sum of.
            let scores: Vec<(f64, f64)> = (first..=token)
                .map(|key| {
                    let k = kept(self.shape.precision, &session.k[at(key)..][..dim]);
                    let terms = q.iter().zip(k).map(|(&q, k)| f64::from(q) * k);
                    terms.fold((0.0, 0.0), |(sum, size), t| (sum + scale * t, size + scale * t.abs()))
                })
                .collect();
            let max = scores.iter().fold(f64::MIN, |max, s| max.max(s.0));
            let size = scores.iter().fold(0.0f64, |max, s| max.max(s.1));
            let sum: f64 = scores.iter().map(|s| (s.0 - max).exp()).sum();
            // A score that is off by e makes its weight wrong by a factor of e^e.
            let mut loss = 1e-6 + size * 2f64.powi(-21);
            if self.cpu.path() == Path::Amx && dim.is_multiple_of(32) {
                // Half a unit of a query's second bf16, and of a weight's only one.
                loss += size * 2f64.powi(-17) + 2f64.powi(-8);
            }
            for (key, score) in (first..).zip(&scores) {
                let weight = (score.0 - max).exp() / sum;
                let values = kept(self.shape.precision, &session.v[at(key)..][..dim]);
                for (out, v) in out[head * dim..][..dim].iter_mut().zip(values) {
                    let term = weight * v;
                    *out = (out.0 + term, out.1 + term.abs() * loss);
                }
            }
        }
        out
    }
}

/// A head's key or value as an arena keeps it.
fn kept(precision: KvPrecision, x: &[f32]) -> Vec<f64> {
    let short = |v: f32| bf16::from_f32(v).to_f32();
    // Half up, unlike a conversion.
    let unpacked = |v: f32| f64::from(f32::from_bits((v.to_bits() + 0x8000) & 0xffff_0000));
    let inverse = |v: f32| if v == 0.0 { 0.0 } else { 1.0 / v };
    match precision {
        KvPrecision::Bf16 => x.iter().map(|&x| f64::from(short(x))).collect(),
        KvPrecision::Int8 => {
            let scale = short(x.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0);
            let q = |x: f32| (x * inverse(scale)).round_ties_even().clamp(-127.0, 127.0);
            x.iter().map(|&x| unpacked(q(x) * scale)).collect()
        }
        KvPrecision::Int4 => {
            let group = |x: &[f32]| -> Vec<f64> {
                let (low, high) = x.iter().fold((f32::MAX, f32::MIN), |(l, h), &x| (l.min(x), h.max(x)));
                let (step, low) = (short((high - low) / 15.0), short(low));
                let q = |x: f32| ((x - low) * inverse(step)).round_ties_even().clamp(0.0, 15.0);
                x.iter().map(|&x| unpacked(q(x) * step + low)).collect()
            };
            x.chunks(32).flat_map(group).collect()
        }
    }
}
