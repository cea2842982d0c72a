//! Attention of a prefill's chunk and of one token, over many keys.

use std::hint::black_box;

use forkpoint_kernels::{
    Attention, AttentionBatch, Backend, Group, KvPrecision, KvShape, PAGE_TOKENS, Slot, Span,
    cpu::{Cpu, Path},
};

use crate::{
    peak::{Multiplies, Peak, Reads},
    report,
    support::{Random, rows, store},
};

/// Query heads, key-value heads and numbers in a head (SmolLM2-135M).
const SHAPE: (usize, usize, usize) = (9, 3, 64);
/// Layers that are read in turn: one alone would stay in the cache.
const LAYERS: usize = 30;

pub(crate) fn run(path: Path) {
    let (heads, kv_heads, dim) = SHAPE;
    let attention = Attention { heads, scale: 1.0 / (dim as f32).sqrt(), window: None };
    let mut random = Random(2);
    for keys in [512, 4096] {
        let mut cpu = Cpu::with_path(path, 1).unwrap();
        let pages = keys / PAGE_TOKENS;
        let mut kv = cpu
            .kv(KvShape {
                layers: LAYERS,
                heads: kv_heads,
                head_dim: dim,
                pages,
                precision: KvPrecision::Bf16,
            })
            .unwrap();
        let table: Vec<u32> = (0..pages as u32).rev().collect();
        let slots: Vec<Slot> = (0..keys)
            .map(|p| Slot { page: table[p / PAGE_TOKENS], offset: (p % PAGE_TOKENS) as u32 })
            .collect();
        let width = kv_heads * dim;
        let (k, v) = (random.activations(keys * width), random.activations(keys * width));
        let (k, v) = (rows(&mut cpu, &k, width), rows(&mut cpu, &v, width));
        (0..LAYERS).for_each(|layer| store(&mut cpu, &mut kv, layer, &k, &v, &slots));
        for count in [1, 4, 64] {
            let q = rows(&mut cpu, &random.activations(count * heads * dim), heads * dim);
            let mut out = cpu.rows(count, heads * dim);
            let first = keys - count;
            let spans = [Span { row: 0, rows: count as u32, position: first as u32, pages: 0 }];
            let groups = [Group { span: 0, spans: 1, shared: 0 }];
            let batch = AttentionBatch { groups: &groups, spans: &spans, table: &table };
            let mut layer = 0;
            let mut kernel = || {
                layer = (layer + 1) % LAYERS;
                cpu.attend(&attention, &q, &kv, layer, batch, &mut out);
                black_box(&mut out);
            };
            // Scores and values: two products for each row, key, head and number.
            let seen: usize = (first + 1..=keys).sum();
            let products = (2 * seen * heads * dim) as f64;
            let peak: &dyn Peak = &Multiplies(path);
            report(&format!("attention {count} rows, {keys} keys"), "GMAC/s", products, &mut kernel, peak);
            if count == 1 {
                let bytes = (keys * kv_heads * dim * 4) as f64;
                report(&format!("attention 1 row, {keys} keys read"), "GB/s", bytes, kernel, &Reads);
            }
        }
    }
}
