//! The promise of batch invariance, with `==`; and attention against f64.

mod support;

#[path = "support/sessions.rs"]
mod sessions;

use forkpoint_kernels::{
    Activation, Backend, HostMatrix, KvPrecision, KvShape, Operand, PAGE_TOKENS, Place, Rope, RopePairing,
    SPLIT_TOKENS, Slot, cpu::Cpu,
};
use sessions::{Bench, Garbage, Session, Shape};
use support::{FORMATS, Random, all, linear, linear_fine, matrix_bytes, paths, rows, seen, store, unit};

const SMOL: Shape = Shape { heads: 9, kv_heads: 3, head_dim: 64, window: None, precision: KvPrecision::Bf16 };

#[test]
fn products_do_not_depend_on_the_batch() {
    let mut random = Random(11);
    for path in paths() {
        for format in FORMATS {
            let (n, k) = (83, 512);
            let data = matrix_bytes(format, n, k, &mut random);
            let source = HostMatrix::new(format, n, k, &data).unwrap();
            // More than pass by a panel at once, with tiles and without.
            let (most, some) = (262, 70);
            let x = random.activations(most * k);
            let mut single = Cpu::with_path(path, 1).unwrap();
            let matrix = single.matrix(&source).unwrap();
            let alone: Vec<f32> = x.chunks(k).flat_map(|x| linear(&mut single, &matrix, x)).collect();
            let fine: Vec<f32> = x.chunks(k).flat_map(|x| linear_fine(&mut single, &matrix, x)).collect();
            for threads in [1, 2, 3] {
                let mut cpu = Cpu::with_path(path, threads).unwrap();
                let matrix = cpu.matrix(&source).unwrap();
                for m in [1, 2, 3, 5, 8, 17, 40, 64, some, most] {
                    for (i, x) in x[..m.max(some) * k].chunks(m * k).enumerate() {
                        let y = linear(&mut cpu, &matrix, x);
                        assert!(
                            y == alone[i * m * n..][..y.len()],
                            "{path:?} {format}, {m} rows, {threads} threads"
                        );
                        let y = linear_fine(&mut cpu, &matrix, x);
                        assert!(
                            y == fine[i * m * n..][..y.len()],
                            "{path:?} {format}, {m} rows, {threads} threads, fine"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rowwise_operations_do_not_depend_on_the_batch() {
    let mut random = Random(12);
    let (m, width) = (64, 576);
    let (x, y, gain) =
        (random.activations(m * width), random.activations(m * width), random.activations(width));
    let rope = Rope { frequencies: (0..32).map(|i| 0.7f32.powi(i)).collect(), pairing: RopePairing::Halves };
    for path in paths() {
        let run = |cpu: &mut Cpu, first: usize, count: usize| {
            let part = |v: &[f32]| v[first * width..(first + count) * width].to_vec();
            let gain_vector = cpu.vector(&gain);
            let head_gain = cpu.vector(&gain[..64]);
            let unit = unit(cpu, width);
            let a = rows(cpu, &part(&x), width);
            let b = rows(cpu, &part(&y), width);
            let normed = seen(cpu, &unit, Operand::Norm { x: &a, gain: &gain_vector, eps: 1e-6 });
            let mut q = rows(cpu, &normed, width);
            cpu.head_norm(&mut q, &head_gain, 1e-6);
            let positions: Vec<u32> = (first..first + count).map(|p| p as u32 * 31).collect();
            let slots: Vec<Slot> =
                (0..count as u32).map(|row| Slot { page: row, offset: row % 16 }).collect();
            let shape =
                KvShape { layers: 1, heads: 9, head_dim: 64, pages: count, precision: KvPrecision::Bf16 };
            let mut kv = cpu.kv(shape).unwrap();
            let (mut k, mut v) = (rows(cpu, &part(&y), width), rows(cpu, &part(&y), width));
            let place = Place { positions: &positions, rope: &rope, slots: &slots };
            cpu.rope_store(&place, [&mut q, &mut k, &mut v], &mut kv, 0);
            let gated = [
                Operand::Gate { activation: Activation::Silu, gate: &a, up: &b },
                Operand::Gate { activation: Activation::GeluTanh, gate: &a, up: &q },
            ]
            .map(|gate| seen(cpu, &unit, gate));
            cpu.bias(&mut k, &gain_vector);
            let all = [all(cpu, &q), all(cpu, &k), gated[0].clone(), gated[1].clone()];
            // Row after row.
            (0..count)
                .flat_map(|row| {
                    all.iter().flat_map(move |x| &x[row * width..][..width]).copied().collect::<Vec<_>>()
                })
                .collect::<Vec<f32>>()
        };
        let mut single = Cpu::with_path(path, 1).unwrap();
        let alone: Vec<f32> = (0..m).flat_map(|i| run(&mut single, i, 1)).collect();
        for threads in [1, 2, 3] {
            let mut cpu = Cpu::with_path(path, threads).unwrap();
            for count in [1, 2, 8, 64] {
                for first in (0..m).step_by(count) {
                    let got = run(&mut cpu, first, count);
                    assert!(
                        got == alone[first * 4 * width..][..got.len()],
                        "{path:?}, {count} rows, {threads} threads"
                    );
                }
            }
        }
    }
}

fn close(got: &[f32], exact: &[(f64, f64)], what: &str) {
    for (i, (&got, &(exact, bound))) in got.iter().zip(exact).enumerate() {
        let error = (f64::from(got) - exact).abs();
        // Weights below 2⁻¹²⁶ are none to f32.
        assert!(error <= bound + 1e-30, "{what}, number {i}: {got} against {exact}, {error:e} > {bound:e}");
    }
}

#[test]
fn attention_agrees_with_f64() {
    for path in paths() {
        for (heads, kv_heads, head_dim) in [
            (1, 1, 16),
            (9, 3, 64),
            (4, 1, 48),
            (8, 8, 80),
            (5, 1, 96),
            (2, 1, 128),
            (2, 2, 256),
            (7, 1, 32),
            (16, 2, 64),
        ] {
            for window in [None, Some(1), Some(700)] {
                let shape = Shape { heads, kv_heads, head_dim, window, ..SMOL };
                let mut bench = Bench::new(path, 2, shape, Garbage::NotANumber);
                let tokens = 1091;
                let session = bench.session(tokens);
                for range in [0..1, 1..4, 13..35, 505..521, 1020..1030, tokens - 1..tokens] {
                    let out = bench.attend(&[(&session, range.clone())], &[(1, 0)]);
                    for (out, token) in out[0].chunks(heads * head_dim).zip(range) {
                        close(
                            out,
                            &bench.exact(&session, token),
                            &format!("{path:?} {shape:?} token {token}"),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn packed_keys_and_values_are_read_as_they_were_rounded() {
    for path in paths() {
        for precision in [KvPrecision::Int8, KvPrecision::Int4] {
            for (heads, kv_heads, head_dim) in [(9, 3, 64), (4, 1, 48), (2, 2, 16), (3, 3, 128)] {
                let shape = Shape { heads, kv_heads, head_dim, precision, ..SMOL };
                let mut bench = Bench::new(path, 2, shape, Garbage::NotANumber);
                let session = bench.session(700);
                let out = bench.attend(&[(&session, 690..700)], &[(1, 0)]).remove(0);
                for (out, token) in out.chunks(heads * head_dim).zip(690..) {
                    close(out, &bench.exact(&session, token), &format!("{path:?} {shape:?} token {token}"));
                }
            }
        }
    }
}

/// Every token's attention, all at once, on one thread.
fn whole(bench: &mut Bench, session: &Session) -> Vec<f32> {
    let tokens = bench.tokens(session);
    bench.attend(&[(session, 0..tokens)], &[(1, 0)]).remove(0)
}

#[test]
fn chunks_of_a_prefill_are_the_whole() {
    for path in paths() {
        for (window, precision) in [
            (None, KvPrecision::Bf16),
            (Some(600), KvPrecision::Bf16),
            (None, KvPrecision::Int8),
            (Some(600), KvPrecision::Int4),
        ] {
            let shape = Shape { window, precision, ..SMOL };
            let mut bench = Bench::new(path, 1, shape, Garbage::Huge);
            let tokens = 2 * SPLIT_TOKENS + 77;
            let session = bench.session(tokens);
            let once = whole(&mut bench, &session);
            for threads in [1, 2, 3] {
                let mut bench = Bench::new(path, threads, shape, Garbage::NotANumber);
                let session = bench.session(tokens);
                // Each call unpacks all pages before its rows: few calls, then.
                let packed = precision != KvPrecision::Bf16;
                for chunk in [1, 3, 16, 64, 512].into_iter().filter(|&chunk| !packed || chunk >= 64) {
                    let got: Vec<f32> = (0..tokens)
                        .step_by(chunk)
                        .flat_map(|start| {
                            let range = start..tokens.min(start + chunk);
                            bench.attend(&[(&session, range)], &[(1, 0)]).remove(0)
                        })
                        .collect();
                    assert!(got == once, "{path:?}, {shape:?}, chunks of {chunk}, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn forks_in_a_group_are_forks_alone() {
    for path in paths() {
        for (window, prefix, precision) in [
            (None, 40, KvPrecision::Bf16),
            (None, 513, KvPrecision::Bf16),
            (None, 1300, KvPrecision::Bf16),
            (Some(300), 1300, KvPrecision::Bf16),
            (Some(30), 513, KvPrecision::Bf16),
            (None, 1300, KvPrecision::Int8),
            (Some(300), 1300, KvPrecision::Int4),
        ] {
            for threads in [1, 2] {
                let shape = Shape { window, precision, ..SMOL };
                let mut bench = Bench::new(path, threads, shape, Garbage::NotANumber);
                let parent = bench.session(prefix);
                let lengths = [1, 24, 3, 17, 1, 50, 2, 130];
                let forks: Vec<Session> = lengths.map(|tokens| bench.fork(&parent, tokens)).into();
                let steps: Vec<_> = forks.iter().zip(lengths).map(|(f, n)| (f, prefix..prefix + n)).collect();
                let alone: Vec<Vec<f32>> = steps
                    .iter()
                    .map(|step| bench.attend(std::slice::from_ref(step), &[(1, 0)]).remove(0))
                    .collect();
                for (fork, alone) in forks.iter().zip(&alone) {
                    let last = bench.tokens(fork) - 1;
                    let wide = shape.heads * shape.head_dim;
                    close(&alone[alone.len() - wide..], &bench.exact(fork, last), "a fork's last token");
                }
                let most = prefix / PAGE_TOKENS;
                for groups in [
                    vec![(8, most)],
                    vec![(8, 0)],
                    vec![(8, most.min(SPLIT_TOKENS / PAGE_TOKENS))],
                    vec![(3, most), (5, most / 2)],
                    vec![(1, most), (1, 0), (6, 1)],
                    vec![(1, 0); 8],
                ] {
                    let together = bench.attend(&steps, &groups);
                    assert!(
                        together == alone,
                        "{path:?}, prefix {prefix}, {window:?}, groups {groups:?}, {threads} threads"
                    );
                }
                let backwards: Vec<_> = steps.iter().rev().cloned().collect();
                let mut together = bench.attend(&backwards, &[(8, most)]);
                together.reverse();
                assert!(together == alone, "{path:?}: the order of forks");
            }
        }
    }
}

#[test]
fn what_lies_beyond_a_session_does_not_count() {
    for path in paths() {
        for tokens in [1, 15, 17, 530] {
            let of = |garbage| {
                let mut bench = Bench::new(path, 2, SMOL, garbage);
                let session = bench.session(tokens);
                whole(&mut bench, &session)
            };
            let clean = of(Garbage::Zeros);
            assert!(clean.iter().all(|v| v.is_finite()));
            assert!(clean == of(Garbage::Huge), "{path:?}, {tokens} tokens");
            assert!(clean == of(Garbage::NotANumber), "{path:?}, {tokens} tokens");
        }
    }
}

#[test]
fn a_later_token_that_is_not_a_number_spares_the_earlier() {
    for path in paths() {
        let mut bench = Bench::new(path, 1, SMOL, Garbage::Zeros);
        let mut session = bench.session(20);
        let clean = whole(&mut bench, &session);
        // The same session, whose token 18 has values without bound.
        let narrow = SMOL.kv_heads * SMOL.head_dim;
        session.v[18 * narrow..19 * narrow].fill(f32::INFINITY);
        let k = rows(&mut bench.cpu, &session.k[18 * narrow..19 * narrow], narrow);
        let v = rows(&mut bench.cpu, &session.v[18 * narrow..19 * narrow], narrow);
        let slot = Slot { page: session.pages[1], offset: 2 };
        store(&mut bench.cpu, &mut bench.kv, sessions::LAYER, &k, &v, &[slot]);
        let after = whole(&mut bench, &session);
        let wide = SMOL.heads * SMOL.head_dim;
        assert!(after[..18 * wide] == clean[..18 * wide], "{path:?}");
        assert!(after[18 * wide..].iter().all(|v| !v.is_finite()), "{path:?}");
    }
}
