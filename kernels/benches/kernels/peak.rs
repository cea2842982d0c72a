//! What this machine's processor can do at most, measured.

#![allow(unsafe_code, reason = "the instructions whose rate is a peak")]

use std::{hint::black_box, sync::OnceLock};

use forkpoint_kernels::cpu::Path;

use crate::seconds;

/// A rate that no kernel of the same instructions can exceed.
pub(crate) trait Peak {
    /// What it is the peak of.
    fn name(&self) -> &'static str;

    /// Measures it now: products or bytes a second, on one thread.
    fn rate(&self) -> f64;
}

/// Products of bytes.
pub(crate) struct Dots(pub(crate) Path);
/// Products of f32.
pub(crate) struct Multiplies(pub(crate) Path);
/// Products of bf16, where there is an instruction for them.
pub(crate) struct Halves(pub(crate) Path);
/// Bytes read from memory.
pub(crate) struct Reads;

/// Turns of a peak's loop: about 2 ms.
const TURNS: usize = 500_000;
/// Independent sums in a loop: more than an instruction's latency.
const CHAINS: usize = 10;

impl Peak for Dots {
    fn name(&self) -> &'static str {
        "the int8 peak"
    }

    fn rate(&self) -> f64 {
        timed(match self.0 {
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => (32, x86::maddubs as unsafe fn()),
            #[cfg(target_arch = "x86_64")]
            Path::AvxVnni => (32, x86::dpbusd256),
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 | Path::Avx512Bf16 | Path::Amx => (64, x86::dpbusd),
            path => unreachable!("no peak of {}", path.name()),
        })
    }
}

impl Peak for Multiplies {
    fn name(&self) -> &'static str {
        "the f32 peak"
    }

    fn rate(&self) -> f64 {
        timed(match self.0 {
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 | Path::AvxVnni => (8, x86::fma256 as unsafe fn()),
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 | Path::Avx512Bf16 | Path::Amx => (16, x86::fma512),
            path => unreachable!("no peak of {}", path.name()),
        })
    }
}

impl Peak for Halves {
    fn name(&self) -> &'static str {
        "the bf16 peak"
    }

    fn rate(&self) -> f64 {
        timed(match self.0 {
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Bf16 => (32, x86::dpbf16 as unsafe fn()),
            // Fewer turns, of more products each.
            #[cfg(target_arch = "x86_64")]
            Path::Amx => (x86::TILE / x86::TILES_FEWER, x86::dpbf16_tiles),
            path => unreachable!("no bf16 peak of {}", path.name()),
        })
    }
}

/// Products a second of a loop that does so many in an instruction.
fn timed((lanes, run): (usize, unsafe fn())) -> f64 {
    // SAFETY: it is the loop of a path that this processor has.
    let time = seconds(|| unsafe { run() });
    (TURNS * CHAINS * lanes) as f64 / time
}

impl Peak for Reads {
    fn name(&self) -> &'static str {
        "the read bandwidth"
    }

    fn rate(&self) -> f64 {
        // Beyond the last cache.
        static DATA: OnceLock<Vec<u64>> = OnceLock::new();
        let data = DATA.get_or_init(|| (0..12 << 20).collect());
        let mut sums = [0u64; 16];
        let time = seconds(|| {
            for chunk in data.as_chunks::<16>().0 {
                for (sum, v) in sums.iter_mut().zip(chunk) {
                    *sum ^= v;
                }
            }
        });
        black_box(sums);
        size_of_val(data.as_slice()) as f64 / time
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::{asm, x86_64::*};
    use std::hint::black_box;

    use super::{CHAINS, TURNS};

    /// Keeps a chain's vectors in registers and the compiler from foreseeing them.
    macro_rules! chains {
        ($zero:expr, $one:ident => $next:expr, $a:expr) => {{
            let a = black_box($a);
            let mut sums = [black_box($zero); CHAINS];
            for _ in 0..TURNS {
                for sum in &mut sums {
                    let $one = *sum;
                    *sum = $next(a, $one);
                }
            }
            black_box(sums);
        }};
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn maddubs() {
        // The result feeds the next: 10 chains hide the latency.
        chains!(_mm256_setzero_si256(), sum => |a, sum| _mm256_maddubs_epi16(a, sum), _mm256_set1_epi8(3));
    }

    /// # Safety
    /// The processor has FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn fma256() {
        chains!(_mm256_setzero_ps(), sum => |a, sum| _mm256_fmadd_ps(a, a, sum), _mm256_set1_ps(1e-3));
    }

    /// # Safety
    /// The processor has AVX-VNNI.
    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) unsafe fn dpbusd256() {
        chains!(_mm256_setzero_si256(), sum => |a, sum| _mm256_dpbusd_avx_epi32(sum, a, a), _mm256_set1_epi8(3));
    }

    /// # Safety
    /// The processor has AVX-512 F and BF16.
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) unsafe fn dpbf16() {
        // SAFETY: 32 bf16 and 32 u16 are the same bits.
        let ones: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi16(0x3f80)) };
        chains!(_mm512_setzero_ps(), sum => |a, sum| _mm512_dpbf16_ps(sum, a, a), ones);
    }

    /// Products of a full tile.
    pub(super) const TILE: usize = 16 * 16 * 32;
    /// How many times fewer turns their loop takes.
    pub(super) const TILES_FEWER: usize = 16;

    /// # Safety
    /// The processor has AMX-BF16, and the system lets this process use it.
    pub(super) unsafe fn dpbf16_tiles() {
        /// What `ldtilecfg` reads: palette 1, all registers 16 rows of 64 bytes.
        #[repr(C, align(64))]
        struct Config([u8; 16], [u16; 16], [u8; 16]);
        const { assert!((TURNS * CHAINS / TILES_FEWER).is_multiple_of(4), "it counts down to 0 by fours") };
        let mut config = Config([0; 16], [0; 16], [0; 16]);
        config.0[0] = 1;
        config.1[..8].fill(64);
        config.2[..8].fill(16);
        // SAFETY: the caller's promise; it touches nothing but registers.
        unsafe {
            asm!(
                "ldtilecfg [{config}]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tdpbf16ps tmm1, tmm4, tmm5",
                "tdpbf16ps tmm2, tmm4, tmm5",
                "tdpbf16ps tmm3, tmm4, tmm5",
                "sub {turns}, 4",
                "jnz 2b",
                "tilerelease",
                config = in(reg) &raw const config, turns = inout(reg) TURNS * CHAINS / TILES_FEWER => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
    }

    /// # Safety
    /// The processor has AVX-512 F and VNNI.
    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) unsafe fn dpbusd() {
        chains!(_mm512_setzero_si512(), sum => |a, sum| _mm512_dpbusd_epi32(sum, a, a), _mm512_set1_epi8(3));
    }

    /// # Safety
    /// The processor has AVX-512 F.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn fma512() {
        chains!(_mm512_setzero_ps(), sum => |a, sum| _mm512_fmadd_ps(a, a, sum), _mm512_set1_ps(1e-3));
    }
}
