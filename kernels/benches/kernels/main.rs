//! How much of this machine's own peak the kernels reach.
//!
//! `cargo bench -p forkpoint-kernels` prints, for each SIMD path that the processor
//! has, products per second and their share of a peak that is measured in the
//! same second on the same thread: int8 dot products for quantised weights, f32
//! multiply-adds for plain weights and attention, read bandwidth for single
//! rows. Each figure is the median of paired rounds, in the thread's own
//! processor time, so that a noisy neighbour slows both sides or neither. `FORKPOINT_CPU` picks one path, and arguments
//! pick measures: `cargo bench -p forkpoint-kernels -- gemm attention`.

#![allow(clippy::print_stdout, reason = "a benchmark prints")]

#[path = "../../tests/support/mod.rs"]
mod support;

mod attention;
mod gemm;
mod peak;

use forkpoint_kernels::cpu::Path;
use rustix::time::{ClockId, clock_gettime};

/// Pairs of rounds whose median is printed.
const ROUNDS: usize = 9;
/// Seconds that a round lasts at least.
const ROUND: f64 = 0.004;

fn main() {
    if cfg!(feature = "emulate-avx512") {
        println!("emulated kernels are for tests: there is nothing to measure");
        return;
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wants =
        |measure: &str| wanted.is_empty() || wanted.iter().any(|word| measure.starts_with(word.as_str()));
    for path in support::paths().into_iter().filter(|&path| path != Path::Scalar) {
        println!("\n{}", path.name());
        if wants("gemm") {
            gemm::run(path);
        }
        if wants("attention") {
            attention::run(path);
        }
    }
}

/// Prints a measure: its rate in units of 10⁹ a second, and its share of a peak.
fn report(name: &str, unit: &str, work: f64, mut kernel: impl FnMut(), peak: &dyn peak::Peak) {
    let times = rounds(&mut kernel);
    let (mut rates, mut shares) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let rate = times as f64 * work / seconds(|| (0..times).for_each(|_| kernel()));
        let most = peak.rate();
        rates.push(rate);
        shares.push(rate / most);
    }
    println!(
        "  {name:<44} {:7.1} {unit:<7} {:4.0} % of {}",
        median(&mut rates) / 1e9,
        100.0 * median(&mut shares),
        peak.name()
    );
}

/// How often to call something for a round.
fn rounds(kernel: &mut impl FnMut()) -> usize {
    kernel();
    let once = seconds(&mut *kernel);
    (ROUND / once).ceil().max(1.0) as usize
}

/// Processor time of this thread, in seconds.
fn seconds(f: impl FnOnce()) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    let start = now();
    f();
    now() - start
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
