//! What the tests of kernels share: numbers, matrices, paths.
#![allow(dead_code, unreachable_pub, reason = "each test file is a crate that uses a part")]

use forkpoint_kernels::cpu::{Cpu, Kv, Matrix, Path, Rows};
use forkpoint_kernels::{Backend, Format, HostMatrix, Operand, Place, Rope, RopePairing, Rounding, Slot};
use half::{bf16, f16};

/// Every format.
pub const FORMATS: [Format; 9] = [
    Format::F32,
    Format::F16,
    Format::BF16,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q8_0,
    Format::Q4K,
    Format::Q6K,
];

/// Reproducible numbers (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// In −1..1.
    pub fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Like activations: mostly small, now and then large.
    pub fn activation(&mut self) -> f32 {
        let v = self.number() + self.number() + self.number();
        if self.below(100) == 0 { v * 20.0 } else { v }
    }

    pub fn activations(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.activation()).collect()
    }
}

/// The paths that this processor has, or the one that `FORKPOINT_CPU` names;
/// says which are passed over, once for each test.
#[allow(clippy::print_stdout, reason = "a test that is skipped says so")]
pub fn paths() -> Vec<Path> {
    let only = std::env::var("FORKPOINT_CPU").ok();
    let wanted = |path: &Path| only.as_ref().is_none_or(|only| only == path.name());
    let mut have = Vec::new();
    for path in Path::ALL.into_iter().filter(wanted) {
        if path.available() {
            have.push(path);
        } else {
            println!("skipped: this processor has no {}", path.name());
        }
    }
    have
}

/// The file's bytes of a matrix with random numbers and scales.
pub fn matrix_bytes(format: Format, rows: usize, cols: usize, random: &mut Random) -> Vec<u8> {
    let mut data = Vec::new();
    for _ in 0..rows * (cols / format.block()) {
        let mut scale = |size: f32| f16::from_f32((random.number() + 1.5) * size).to_le_bytes();
        // Scales of an f16 at the offsets where the format has them.
        let scales: Vec<(usize, [u8; 2])> = match format {
            Format::F32 | Format::F16 | Format::BF16 => {
                let w = random.number();
                match format {
                    Format::F32 => data.extend(w.to_le_bytes()),
                    Format::F16 => data.extend(f16::from_f32(w).to_le_bytes()),
                    _ => data.extend(bf16::from_f32(w).to_le_bytes()),
                }
                continue;
            }
            Format::Q4_0 | Format::Q5_0 => vec![(0, scale(-0.02))],
            Format::Q8_0 => vec![(0, scale(0.005))],
            Format::Q4_1 => vec![(0, scale(0.02)), (2, scale(-0.15))],
            Format::Q4K => vec![(0, scale(0.001)), (2, scale(0.002))],
            Format::Q6K => vec![(208, scale(0.0005))],
            other => panic!("no test data in {other}"),
        };
        let start = data.len();
        data.extend((0..format.block_bytes()).map(|_| random.bits() as u8));
        for (at, bytes) in scales {
            data[start + at..start + at + 2].copy_from_slice(&bytes);
        }
    }
    data
}

/// `linear` of one matrix on row-major activations.
pub fn linear(cpu: &mut Cpu, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    rounded(cpu, matrix, x, Rounding::Coarse)
}

/// The same, rounded less.
pub fn linear_fine(cpu: &mut Cpu, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    rounded(cpu, matrix, x, Rounding::Fine)
}

/// The same, rounded as inputs are that have outliers.
pub fn linear_outliers(cpu: &mut Cpu, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    rounded(cpu, matrix, x, Rounding::Outliers)
}

fn rounded(cpu: &mut Cpu, matrix: &Matrix, x: &[f32], rounding: Rounding) -> Vec<f32> {
    let x = rows(cpu, x, matrix.inputs());
    let mut out = cpu.rows(x.len(), matrix.outputs());
    cpu.linear(Operand::Rows(&x), rounding, &mut [(matrix, &mut out)]);
    all(cpu, &out)
}

/// The matrix whose products are their operands.
pub fn unit(cpu: &mut Cpu, width: usize) -> Matrix {
    let mut data = vec![0; 4 * width * width];
    (0..width).for_each(|i| data[4 * i * (width + 1)..][..4].copy_from_slice(&1f32.to_le_bytes()));
    cpu.matrix(&HostMatrix::new(Format::F32, width, width, &data).unwrap()).unwrap()
}

/// What an operand is.
pub fn seen(cpu: &mut Cpu, unit: &Matrix, x: Operand<'_, Cpu>) -> Vec<f32> {
    let mut out = cpu.rows(100, unit.outputs());
    cpu.linear(x, Rounding::Coarse, &mut [(unit, &mut out)]);
    all(cpu, &out)
}

/// Stores keys and values as they are: nothing turns.
pub fn store(cpu: &mut Cpu, kv: &mut Kv, layer: usize, k: &Rows, v: &Rows, slots: &[Slot]) {
    let rope = Rope { frequencies: vec![0.0; kv.shape().head_dim / 2], pairing: RopePairing::Halves };
    let place = Place { positions: &vec![0; slots.len()], rope: &rope, slots };
    let [mut q, mut k, mut v] = [k, k, v].map(|from| {
        let numbers = all(cpu, from);
        rows(cpu, &numbers, from.width())
    });
    cpu.rope_store(&place, [&mut q, &mut k, &mut v], kv, layer);
}

/// Rows that hold `x`.
pub fn rows(cpu: &mut Cpu, x: &[f32], width: usize) -> Rows {
    let mut rows = cpu.rows(x.len() / width, width);
    cpu.write(&mut rows, x);
    rows
}

/// All numbers of rows, row after row.
pub fn all(cpu: &Cpu, rows: &Rows) -> Vec<f32> {
    (0..rows.len()).flat_map(|row| cpu.read(rows, row).to_vec()).collect()
}

/// One row of a matrix in f64.
pub fn weights(source: &HostMatrix<'_>, row: usize) -> Vec<f64> {
    let mut out = vec![0.0; source.cols()];
    source.dequantize_row(row, &mut out);
    out.into_iter().map(f64::from).collect()
}
