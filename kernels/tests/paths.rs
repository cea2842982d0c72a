//! Every path of every operation against plain mathematics in f64.

mod support;

use forkpoint_kernels::{
    Activation, Backend, Format, HostMatrix, KernelError, KvPrecision, KvShape, Operand, Place, Rope,
    RopePairing, Slot, cpu::Cpu, cpu::Path,
};
use half::bf16;
use support::{
    FORMATS, Random, all, linear, linear_fine, linear_outliers, matrix_bytes, paths, rows, seen, unit,
    weights,
};

/// Activations as the integer kernels see them: int8 per 32, times a scale.
fn quantised(x: &[f32]) -> Vec<f64> {
    let block = |x: &[f32]| {
        let largest = x.iter().fold(0.0f32, |a, v| a.max(v.abs()));
        let (inverse, scale) = (127.0 / largest, largest / 127.0);
        let one = move |v: &f32| f64::from((v * inverse).round_ties_even()) * f64::from(scale);
        x.iter().map(one).collect::<Vec<f64>>()
    };
    x.chunks(32).flat_map(block).collect()
}

/// How a path rounds what it multiplies a format's weights with.
#[derive(Clone, Copy)]
enum Rounding {
    None,
    Int8,
    Bf16,
}

impl Rounding {
    fn of(path: Path, format: Format) -> Self {
        match format {
            Format::BF16 if matches!(path, Path::Avx512Bf16 | Path::Amx) => Self::Bf16,
            Format::F32 | Format::F16 | Format::BF16 => Self::None,
            _ => Self::Int8,
        }
    }

    /// Activations as the kernels see them: with one number each, or a second for
    /// what the first rounds off.
    fn seen(self, x: &[f32], fine: bool) -> Vec<f64> {
        let one = |x: &[f32]| match self {
            Self::None => x.iter().map(|&v| v.into()).collect(),
            Self::Int8 => quantised(x),
            Self::Bf16 => x.iter().map(|&v| bf16::from_f32(v).to_f64()).collect(),
        };
        let coarse = one(x);
        if !fine {
            return coarse;
        }
        // The kernels take the rest of an f32 product, so it is one here.
        let rest: Vec<f32> = x.iter().zip(&coarse).map(|(x, &c)| x - c as f32).collect();
        coarse.iter().zip(one(&rest)).map(|(a, b)| a + b).collect()
    }

    /// By how much a product misses because of it.
    fn loss(self, w: &[f64], x: &[f32], fine: bool) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Int8 => {
                // Half a step of each block's scale; and of the rest's, whose
                // largest is half a step of the first.
                let steps = if fine { 1.01 / 508.0 } else { 0.501 };
                let of_block = |(w, x): (&[f64], &[f32])| {
                    let step = x.iter().fold(0.0f32, |a, v| a.max(v.abs())) / 127.0;
                    steps * f64::from(step) * w.iter().map(|w| w.abs()).sum::<f64>()
                };
                w.chunks(32).zip(x.chunks(32)).map(of_block).sum()
            }
            Self::Bf16 => {
                // Half a unit of 8 bits; of two numbers, of 16 and a sign.
                let unit = if fine { 2f64.powi(-17) } else { 2f64.powi(-8) };
                unit * w.iter().zip(x).map(|(w, &x)| (w * f64::from(x)).abs()).sum::<f64>()
            }
        }
    }
}

#[test]
fn outliers_cost_products_where_a_scale_is_shared_alone() {
    let mut random = Random(23);
    for path in paths() {
        for format in FORMATS {
            let (n, k, m) = (40, 512, 3);
            let data = matrix_bytes(format, n, k, &mut random);
            let mut cpu = Cpu::with_path(path, 1).unwrap();
            let matrix = cpu.matrix(&HostMatrix::new(format, n, k, &data).unwrap()).unwrap();
            let x = random.activations(m * k);
            let got = linear_outliers(&mut cpu, &matrix, &x);
            let (coarse, fine) = (linear(&mut cpu, &matrix, &x), linear_fine(&mut cpu, &matrix, &x));
            let (like, unlike) = match Rounding::of(path, format) {
                Rounding::Int8 => (fine, Some(coarse)),
                Rounding::Bf16 => (coarse, Some(fine)),
                Rounding::None => (coarse, None),
            };
            assert!(got == like && Some(got) != unlike, "{path:?} {format}");
        }
    }
}

#[test]
fn products_agree_with_f64() {
    let mut random = Random(1);
    for path in paths() {
        let mut cpu = Cpu::with_path(path, 2).unwrap();
        for format in FORMATS {
            for (n, blocks) in [(1, 1), (15, 2), (16, 3), (17, 1), (100, 2)] {
                let plain = format.block() == 1;
                let k = if plain { [1, 31, 96][blocks - 1] } else { format.block().max(32) * blocks };
                let data = matrix_bytes(format, n, k, &mut random);
                let source = HostMatrix::new(format, n, k, &data).unwrap();
                let matrix = cpu.matrix(&source).unwrap();
                for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 40, 70] {
                    let x = random.activations(m * k);
                    let y = linear(&mut cpu, &matrix, &x);
                    let rounding = Rounding::of(path, format);
                    for (i, (x, y)) in x.chunks(k).zip(y.chunks(n)).enumerate() {
                        let seen = rounding.seen(x, false);
                        for (j, &y) in y.iter().enumerate() {
                            let w = weights(&source, j);
                            let exact: f64 = w.iter().zip(&seen).map(|(w, x)| w * x).sum();
                            // Rounding of f32 sums: some units of the largest terms.
                            let largest = w.iter().fold(0.0f64, |a, w| a.max(w.abs()));
                            let bound = 2e-6 * largest * seen.iter().map(|x| x.abs()).sum::<f64>();
                            let error = (f64::from(y) - exact).abs();
                            assert!(
                                error <= bound,
                                "{path:?} {format} {n}x{k}, row {i} of {m}, output {j}: {y} against {exact}, {error:e} > {bound:e}"
                            );
                            let truth: f64 = w.iter().zip(x).map(|(w, &x)| w * f64::from(x)).sum();
                            let loss = rounding.loss(&w, x, false);
                            assert!((f64::from(y) - truth).abs() <= bound + loss, "{path:?} {format}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn fine_products_agree_with_f64_and_the_reference() {
    let mut random = Random(8);
    for path in paths() {
        let mut cpu = Cpu::with_path(path, 2).unwrap();
        let mut reference = Cpu::with_path(Path::Scalar, 1).unwrap();
        for format in FORMATS {
            for (n, blocks) in [(1, 1), (15, 2), (16, 3), (17, 1), (100, 2)] {
                let plain = format.block() == 1;
                let k = if plain { [1, 31, 96][blocks - 1] } else { format.block().max(32) * blocks };
                let data = matrix_bytes(format, n, k, &mut random);
                let source = HostMatrix::new(format, n, k, &data).unwrap();
                let matrix = cpu.matrix(&source).unwrap();
                for m in [1, 2, 3, 4, 5, 7, 8, 9, 13, 40, 70] {
                    let x = random.activations(m * k);
                    let y = linear_fine(&mut cpu, &matrix, &x);
                    let scalar = linear_fine(&mut reference, &matrix, &x);
                    let rounding = Rounding::of(path, format);
                    if matches!(rounding, Rounding::None) {
                        assert_eq!(y, linear(&mut cpu, &matrix, &x), "{path:?} {format}: nothing to refine");
                    }
                    for (i, x) in x.chunks(k).enumerate() {
                        let seen = rounding.seen(x, true);
                        let size: f64 = seen.iter().map(|x| x.abs()).sum();
                        for j in 0..n {
                            let (y, scalar) = (f64::from(y[i * n + j]), f64::from(scalar[i * n + j]));
                            let w = weights(&source, j);
                            let exact: f64 = w.iter().zip(&seen).map(|(w, x)| w * x).sum();
                            // Rounding of f32 sums: some units of the largest terms.
                            let bound = 2e-6 * w.iter().fold(0.0f64, |a, w| a.max(w.abs())) * size;
                            let place = format!("{path:?} {format} {n}x{k}, row {i} of {m}, output {j}");
                            assert!((y - exact).abs() <= bound, "{place}: {y} against {exact}");
                            let truth: f64 = w.iter().zip(x).map(|(w, &x)| w * f64::from(x)).sum();
                            let loss = rounding.loss(&w, x, true);
                            assert!(
                                (y - scalar).abs() <= 2.0 * bound + loss,
                                "{place}: {y} against {scalar}"
                            );
                            assert!((y - truth).abs() <= bound + loss, "{place}: {y} is far from {truth}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn extremes_of_bytes_do_not_saturate() {
    const ONE: [u8; 2] = 0x3c00u16.to_le_bytes();
    for path in paths() {
        let mut cpu = Cpu::with_path(path, 1).unwrap();
        for (format, q) in [
            (Format::Q8_0, vec![0x80, 0x7f, 0x81, 0xff, 0x00]),
            (Format::Q4_0, vec![0x00, 0xff, 0x0f]),
            (Format::Q4_1, vec![0x00, 0xff, 0xf0]),
            (Format::Q5_0, vec![0x00, 0xff, 0x0f]),
        ] {
            for q in q {
                let mut block = vec![q; format.block_bytes()];
                block[..2].copy_from_slice(&ONE);
                if format == Format::Q4_1 {
                    block[2..4].copy_from_slice(&ONE);
                }
                let data = block.repeat(3 * 20);
                let source = HostMatrix::new(format, 20, 96, &data).unwrap();
                let matrix = cpu.matrix(&source).unwrap();
                for pattern in [[127.0, 127.0], [-127.0, -127.0], [127.0, -127.0], [-127.0, 126.0]] {
                    let x: Vec<f32> = (0..96 * 5).map(|i| pattern[i % 2]).collect();
                    let w = weights(&source, 0);
                    let exact: f64 = w.iter().zip(&x).map(|(w, &x)| w * f64::from(x)).sum();
                    for y in linear(&mut cpu, &matrix, &x) {
                        let error = (f64::from(y) - exact).abs();
                        assert!(
                            y == exact as f32 || error < exact.abs() * 1e-6,
                            "{path:?} {format} {q:#x} {pattern:?}: {y} against {exact}"
                        );
                    }
                }
            }
        }
        // Six bits at their ends, with scales of 127 and −128.
        for (low, high) in [(0x00, 0x00), (0xff, 0xff)] {
            for scale in [0x7f, 0x80] {
                let mut block = vec![low; 128];
                block.extend([high; 64]);
                block.extend([scale; 16]);
                block.extend(ONE);
                let data = block.repeat(17);
                let source = HostMatrix::new(Format::Q6K, 17, 256, &data).unwrap();
                let matrix = cpu.matrix(&source).unwrap();
                let x: Vec<f32> = (0..256).map(|i| if i % 5 == 0 { -127.0 } else { 127.0 }).collect();
                let exact: f64 = weights(&source, 0).iter().zip(&x).map(|(w, &x)| w * f64::from(x)).sum();
                for y in linear(&mut cpu, &matrix, &x) {
                    assert!((f64::from(y) / exact - 1.0).abs() < 1e-6, "{path:?} {y} against {exact}");
                }
            }
        }
    }
}

#[test]
fn several_matrices_in_one_call() {
    use forkpoint_kernels::Rounding::{Coarse, Fine};
    let mut random = Random(2);
    for path in paths() {
        for threads in [1, 2, 3] {
            let mut cpu = Cpu::with_path(path, threads).unwrap();
            let k = 256;
            let shapes = [
                (Format::Q4_1, 40),
                (Format::F32, 17),
                (Format::Q6K, 90),
                (Format::BF16, 30),
                (Format::Q8_0, 1),
            ];
            let matrices = shapes.map(|(format, n)| {
                let data = matrix_bytes(format, n, k, &mut random);
                cpu.matrix(&HostMatrix::new(format, n, k, &data).unwrap()).unwrap()
            });
            let gain = cpu.vector(&random.activations(k));
            for (m, rounding) in [(1, Coarse), (1, Fine), (70, Coarse), (70, Fine)] {
                let [x, up] = [(); 2].map(|()| rows(&mut cpu, &random.activations(m * k), k));
                for operand in [
                    Operand::Rows(&x),
                    Operand::Norm { x: &x, gain: &gain, eps: 1e-5 },
                    Operand::Gate { activation: Activation::GeluTanh, gate: &x, up: &up },
                ] {
                    let alone = matrices.each_ref().map(|matrix| {
                        let mut out = cpu.rows(m, matrix.outputs());
                        cpu.linear(operand, rounding, &mut [(matrix, &mut out)]);
                        all(&cpu, &out)
                    });
                    let mut out = matrices.each_ref().map(|matrix| cpu.rows(m, matrix.outputs()));
                    let mut pairs: Vec<_> = matrices.iter().zip(&mut out).collect();
                    cpu.linear(operand, rounding, &mut pairs);
                    for (out, alone) in out.iter().zip(&alone) {
                        assert!(all(&cpu, out) == *alone, "{path:?}, {m} rows, {threads} threads");
                    }
                }
            }
        }
    }
}

#[test]
fn operands_made_on_the_way_and_sums_are_the_same_to_the_bit() {
    use forkpoint_kernels::Rounding::{Coarse, Fine};
    let mut random = Random(4);
    for path in paths() {
        for threads in [1, 3] {
            let mut cpu = Cpu::with_path(path, threads).unwrap();
            let (n, k) = (37, 256);
            let unit = unit(&mut cpu, k);
            let gain = cpu.vector(&random.activations(k));
            for format in FORMATS {
                let data = matrix_bytes(format, n, k, &mut random);
                let matrix = cpu.matrix(&HostMatrix::new(format, n, k, &data).unwrap()).unwrap();
                for (m, rounding) in [(1, Coarse), (1, Fine), (70, Coarse), (70, Fine)] {
                    let [x, y] = [(); 2].map(|()| rows(&mut cpu, &random.activations(m * k), k));
                    let before = random.activations(m * n);
                    let activation = Activation::Silu;
                    for made in [
                        Operand::Norm { x: &x, gain: &gain, eps: 1e-5 },
                        Operand::Gate { activation, gate: &x, up: &y },
                        Operand::Rows(&x),
                    ] {
                        let plain = seen(&mut cpu, &unit, made);
                        let plain = rows(&mut cpu, &plain, k);
                        let [mut alone, mut fused] = [(); 2].map(|()| cpu.rows(m, n));
                        cpu.linear(Operand::Rows(&plain), rounding, &mut [(&matrix, &mut alone)]);
                        cpu.linear(made, rounding, &mut [(&matrix, &mut fused)]);
                        let (alone, fused) = (all(&cpu, &alone), all(&cpu, &fused));
                        assert!(alone == fused, "{path:?} {format}, {m} rows");
                        let mut sum = rows(&mut cpu, &before, n);
                        cpu.linear_add(made, rounding, &matrix, &mut sum);
                        let added: Vec<f32> = before.iter().zip(&alone).map(|(a, b)| a + b).collect();
                        assert!(all(&cpu, &sum) == added, "{path:?} {format}, {m} rows, added");
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_a_number_reaches_the_result() {
    let mut random = Random(3);
    for path in paths() {
        let mut cpu = Cpu::with_path(path, 1).unwrap();
        for format in FORMATS {
            let data = matrix_bytes(format, 16, 256, &mut random);
            let matrix = cpu.matrix(&HostMatrix::new(format, 16, 256, &data).unwrap()).unwrap();
            let mut x = random.activations(256 * 2);
            x[40] = f32::NAN;
            let y = linear(&mut cpu, &matrix, &x);
            assert!(y[..16].iter().all(|y| y.is_nan()), "{path:?} {format}");
            assert!(y[16..].iter().all(|y| y.is_finite()), "{path:?} {format}: the other row");
        }
    }
}

#[test]
fn rows_of_the_table_are_exact() {
    let mut random = Random(4);
    for path in paths() {
        let mut cpu = Cpu::with_path(path, 2).unwrap();
        for format in FORMATS {
            let (n, k) = (37, 512);
            let data = matrix_bytes(format, n, k, &mut random);
            let source = HostMatrix::new(format, n, k, &data).unwrap();
            let matrix = cpu.matrix(&source).unwrap();
            let tokens: Vec<u32> = (0..n as u32).rev().chain([5, 5, 0]).collect();
            for scale in [1.0, 22.6] {
                let mut out = cpu.rows(tokens.len(), k);
                cpu.embed(&matrix, &tokens, scale, &mut out);
                for (i, &token) in tokens.iter().enumerate() {
                    let mut row = vec![0.0; k];
                    source.dequantize_row(token as usize, &mut row);
                    row.iter_mut().for_each(|w| *w *= scale);
                    assert_eq!(cpu.read(&out, i), row, "{path:?} {format} token {token}");
                }
            }
        }
    }
}

fn close(got: &[f32], exact: &[f64], bound: f64) {
    assert_eq!(got.len(), exact.len());
    for (i, (&got, &exact)) in got.iter().zip(exact).enumerate() {
        let error = (f64::from(got) - exact).abs();
        assert!(error <= bound * exact.abs().max(1e-3), "number {i}: {got} against {exact}");
    }
}

#[test]
fn norms_agree_with_f64() {
    let mut random = Random(5);
    for path in paths() {
        let mut cpu = Cpu::with_path(path, 2).unwrap();
        for width in [1, 5, 16, 33, 576] {
            let (x, gain) = (random.activations(width * 40), random.activations(width));
            let norm = |x: &[f32]| {
                let squares: f64 = x.iter().map(|&v| f64::from(v).powi(2)).sum();
                let scale = 1.0 / (squares / x.len() as f64 + 1e-5).sqrt();
                x.iter().zip(&gain).map(|(&x, &g)| f64::from(x) * scale * f64::from(g)).collect::<Vec<_>>()
            };
            let exact: Vec<f64> = x.chunks(width).flat_map(norm).collect();
            let gains = cpu.vector(&gain);
            let input = rows(&mut cpu, &x, width);
            let mut out = cpu.rows(40, width);
            cpu.rms_norm(&input, &gains, 1e-5, &mut out);
            close(&all(&cpu, &out), &exact, 1e-6);
            // The same numbers as 10 rows of four heads.
            let mut heads = rows(&mut cpu, &x, width * 4);
            cpu.head_norm(&mut heads, &gains, 1e-5);
            close(&all(&cpu, &heads), &exact, 1e-6);
        }
    }
}

#[test]
fn rotation_agrees_with_f64() {
    let mut random = Random(6);
    for path in paths() {
        let mut cpu = Cpu::with_path(path, 2).unwrap();
        for (half, heads) in [(8, 3), (32, 9), (128, 1)] {
            let frequencies: Vec<f32> =
                (0..half).map(|i| 10_000f32.powf(-(i as f32) / half as f32)).collect();
            for pairing in [RopePairing::Adjacent, RopePairing::Halves] {
                let rope = Rope { frequencies: frequencies.clone(), pairing };
                for positions in [vec![0], vec![7, 8000, 3], (0..70).collect()] {
                    let width = 2 * half * heads;
                    let x = random.activations(width * positions.len());
                    let (head_dim, pages, precision) = (2 * half, positions.len(), KvPrecision::Bf16);
                    let shape = KvShape { layers: 1, heads, head_dim, pages, precision };
                    let mut kv = cpu.kv(shape).unwrap();
                    let slots: Vec<Slot> =
                        (0..pages).map(|page| Slot { page: page as u32, offset: 3 }).collect();
                    let place = Place { positions: &positions, rope: &rope, slots: &slots };
                    let [mut q, mut k, mut v] = [(); 3].map(|()| rows(&mut cpu, &x, width));
                    cpu.rope_store(&place, [&mut q, &mut k, &mut v], &mut kv, 0);
                    let out = all(&cpu, &q);
                    assert_eq!(
                        (all(&cpu, &k), all(&cpu, &v)),
                        (out.clone(), x.clone()),
                        "keys turn, values do not"
                    );
                    for (i, &position) in positions.iter().enumerate() {
                        for (head, pair) in (0..heads * half).map(|i| (i / half, i % half)) {
                            let at = |second: usize| {
                                i * width
                                    + head * 2 * half
                                    + match pairing {
                                        RopePairing::Adjacent => 2 * pair + second,
                                        RopePairing::Halves => pair + second * half,
                                    }
                            };
                            let (a, b) = (f64::from(x[at(0)]), f64::from(x[at(1)]));
                            let angle = f64::from(position as f32 * frequencies[pair]);
                            let (sin, cos) = angle.sin_cos();
                            let size = a.hypot(b) * 3e-7;
                            assert!((f64::from(out[at(0)]) - (a * cos - b * sin)).abs() <= size);
                            assert!((f64::from(out[at(1)]) - (a * sin + b * cos)).abs() <= size);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn gates_and_sums_agree_with_f64() {
    let mut random = Random(7);
    for path in paths() {
        let mut cpu = Cpu::with_path(path, 2).unwrap();
        let (m, width) = (11, 301);
        let mut g: Vec<f32> = random.activations(m * width);
        g[..6].copy_from_slice(&[0.0, 90.0, -90.0, 1e4, -1e4, -20.0]);
        let u = random.activations(m * width);
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let up = rows(&mut cpu, &u, width);
        let unit = unit(&mut cpu, width);
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let exact: Vec<f64> = wide(&g)
                .iter()
                .zip(wide(&u))
                .map(|(&x, u)| match activation {
                    Activation::Silu => x / (1.0 + (-x).exp()) * u,
                    Activation::GeluTanh => {
                        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                        0.5 * x * (1.0 + inner.tanh()) * u
                    }
                })
                .collect();
            let gate = rows(&mut cpu, &g, width);
            let gated = seen(&mut cpu, &unit, Operand::Gate { activation, gate: &gate, up: &up });
            // Small results come from e^x of large x, whose exponent rounds.
            close(&gated, &exact, 4e-6);
        }
        let exact: Vec<f64> = wide(&g).iter().zip(wide(&u)).map(|(a, b)| a + b).collect();
        let mut sum = rows(&mut cpu, &g, width);
        cpu.linear_add(Operand::Rows(&up), forkpoint_kernels::Rounding::Coarse, &unit, &mut sum);
        close(&all(&cpu, &sum), &exact, 1e-7);
        let bias = cpu.vector(&u[..width]);
        let mut sum = rows(&mut cpu, &g, width);
        cpu.bias(&mut sum, &bias);
        assert_eq!(cpu.read(&sum, 10)[300], g[10 * width + 300] + u[300]);
        let mut picked = cpu.rows(3, width);
        cpu.gather(&sum, &[10, 0, 10], &mut picked);
        assert_eq!(cpu.read(&picked, 2), cpu.read(&sum, 10));
        assert_eq!(cpu.read(&picked, 1), cpu.read(&sum, 0));
    }
}

#[test]
fn a_path_that_is_not_there_is_refused() {
    for path in Path::ALL {
        match Cpu::with_path(path, 3) {
            Ok(cpu) => {
                assert!(path.available());
                assert_eq!(cpu.describe(), format!("{}, 3 threads", path.name()));
            }
            Err(error) => {
                assert!(!path.available());
                assert!(matches!(error, KernelError::Path { .. }), "{error}");
            }
        }
    }
}
