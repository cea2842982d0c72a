//! Matrix products in the shapes of a small model's layers.

use std::hint::black_box;

use forkpoint_kernels::{
    Backend, Format, HostMatrix, Operand, Rounding,
    cpu::{Cpu, Path},
};

use crate::{
    peak::{Dots, Halves, Multiplies, Peak, Reads},
    report,
    support::{FORMATS, Random, matrix_bytes, rows},
};

/// Outputs and inputs of a feed-forward block's first matrix (SmolLM2-135M).
const SHAPE: (usize, usize) = (1536, 576);
/// The inputs for formats whose blocks do not divide those.
const WIDER: usize = 768;
/// Copies of it: together beyond any cache, as a model's weights are.
const LAYERS: usize = 60;

pub(crate) fn run(path: Path) {
    let mut random = Random(1);
    for format in FORMATS {
        let (outputs, mut inputs) = SHAPE;
        if !inputs.is_multiple_of(format.block()) {
            inputs = WIDER;
        }
        let data = matrix_bytes(format, outputs, inputs, &mut random);
        let source = HostMatrix::new(format, outputs, inputs, &data).unwrap();
        let mut cpu = Cpu::with_path(path, 1).unwrap();
        let layers: Vec<_> = (0..LAYERS).map(|_| cpu.matrix(&source).unwrap()).collect();
        for count in [1, 4, 64, 256] {
            let x = rows(&mut cpu, &random.activations(count * inputs), inputs);
            let mut out = cpu.rows(count, outputs);
            let mut layer = 0;
            let mut kernel = || {
                layer = (layer + 1) % LAYERS;
                cpu.linear(Operand::Rows(&x), Rounding::Coarse, &mut [(&layers[layer], &mut out)]);
                black_box(&mut out);
            };
            let products = (count * outputs * inputs) as f64;
            let peak: &dyn Peak = match format {
                Format::BF16 if matches!(path, Path::Avx512Bf16 | Path::Amx) => &Halves(path),
                Format::F32 | Format::F16 | Format::BF16 => &Multiplies(path),
                _ => &Dots(path),
            };
            report(&format!("gemm {format} {count} rows"), "GMAC/s", products, &mut kernel, peak);
            if count == 1 {
                let bytes = layers[0].bytes() as f64;
                report(&format!("gemm {format} 1 row, weights read"), "GB/s", bytes, kernel, &Reads);
            }
        }
    }
}
