//! The product in the processor's own instructions.

use std::arch::{asm, x86_64::__cpuid_count};

use super::{ROWS, Shapes, TERMS};

/// Bytes of a full tile's row, and of 16 that follow each other.
const ROW: usize = 64;
const TILE: usize = ROWS * ROW;

/// Looks for AMX-BF16 and AMX-TILE, and asks for the registers.
pub(super) fn ask() -> bool {
    const HAS: u32 = 1 << 22 | 1 << 24;
    let has = __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).edx & HAS == HAS;
    has && permitted()
}

/// A process has the registers on request only, since they add 8 KiB to each thread's
/// state (Linux, Documentation/arch/x86/xstate.rst).
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XTILEDATA: libc::c_long = 18;
    // SAFETY: it takes two numbers. A kernel that knows no such request refuses it.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// # Safety
/// [`ask`] said yes; shapes have 1 to 16 rows of up to 64 bytes.
pub(super) unsafe fn configure(shapes: &Shapes) {
    /// What `ldtilecfg` reads.
    #[repr(C, align(64))]
    struct Config {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }
    let mut config =
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    for (register, &(rows, bytes)) in shapes.iter().enumerate() {
        (config.rows[register], config.row_bytes[register]) = (rows, bytes);
    }
    // SAFETY: there are tiles, and the configuration is a valid one.
    unsafe {
        asm!(
            "ldtilecfg [{}]", in(reg) &raw const config,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// # Safety
/// As for [`configure`].
pub(super) unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, nomem),
        );
    }
}

/// `out[t][r][16·p + o] = Σ_k rows[t][r][k] · weights[p][k][o]` for `T` runs of rows and `P`
/// panels of 16 outputs, one or two of each. A k is a pair of bf16, of which there are
/// `16 · steps`, at least one step; a panel is `[k][16 outputs][2]`, and the second follows
/// the first. Rows lie `stride` bytes apart, and results `out_stride`.
///
/// Two of each are four products for four loads; more of one alone would be more loads.
///
/// # Safety
/// [`Tiles::wide`](super::Tiles::wide) is set for each run's rows; all that is named can
/// be read, or written.
#[inline(always)]
pub(in crate::cpu) unsafe fn products<const T: usize, const P: usize>(
    rows: [*const u32; T],
    stride: usize,
    weights: *const u8,
    steps: usize,
    out: [*mut f32; T],
    out_stride: usize,
) {
    // For each run: its number, its left side, and its sums with the first panel; then with
    // the second.
    macro_rules! with {
        ($($t:literal $left:literal $sum:literal),* $(; $($t2:literal $left2:literal $sum2:literal),*)?) => {
            asm!(
                $(concat!("tilezero tmm", $sum),)*
                $($(concat!("tilezero tmm", $sum2),)*)?
                "2:",
                "lea {second}, [{weights} + {panel}]",
                // What the loads after the next should find in the first-level cache.
                ".rept 16",
                r"prefetcht0 [{weights} + 2 * {tile} + 64 * \+]",
                ".endr",
                "tileloadd tmm6, [{weights} + {row}]",
                $(
                    concat!("mov {at}, [{rows} + 8 * ", $t, "]"),
                    "add {at}, {done}",
                    concat!("tileloadd tmm", $left, ", [{at} + {stride}]"),
                    concat!("tdpbf16ps tmm", $sum, ", tmm", $left, ", tmm6"),
                )*
                $(
                    ".rept 16",
                    r"prefetcht0 [{second} + 2 * {tile} + 64 * \+]",
                    ".endr",
                    "tileloadd tmm7, [{second} + {row}]",
                    $(concat!("tdpbf16ps tmm", $sum2, ", tmm", $left2, ", tmm7"),)*
                )?
                "add {weights}, {tile}",
                "add {done}, {row}",
                "dec {steps}",
                "jnz 2b",
                $(
                    concat!("mov {at}, [{out} + 8 * ", $t, "]"),
                    concat!("tilestored [{at} + {out_stride}], tmm", $sum),
                )*
                $($(
                    concat!("mov {at}, [{out} + 8 * ", $t2, "]"),
                    concat!("tilestored [{at} + {out_stride} + {tile} / 16], tmm", $sum2),
                )*)?
                rows = in(reg) rows.as_ptr(), stride = in(reg) stride, done = inout(reg) 0usize => _,
                weights = inout(reg) weights => _, second = out(reg) _, panel = in(reg) steps * TILE,
                steps = inout(reg) steps => _, out = in(reg) out.as_ptr(), out_stride = in(reg) out_stride,
                row = in(reg) ROW, tile = const TILE, at = out(reg) _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    assert!(steps > 0, "no step");
    // SAFETY: the caller's promise.
    unsafe {
        match (T, P) {
            (1, 1) => with!(0 4 0),
            (2, 1) => with!(0 4 0, 1 5 1),
            (1, 2) => with!(0 4 0; 0 4 2),
            (2, 2) => with!(0 4 0, 1 5 1; 0 4 2, 1 5 3),
            (runs, panels) => unreachable!("{runs} runs of rows, {panels} panels"),
        }
    }
}

/// `out[r][16·p + t] = Σ_k Σ_term rows[k / 16][term][r][k % 16] · pages[p][k][t]` for `P`
/// pages of 16 tokens, 1 to 4. A k is a pair of dimensions in bf16, of which there are
/// `16 · steps`, at least one step; pages are `[k][16 tokens][2]`, and rows
/// `[steps][TERMS][16 rows][16][2]`. Results lie `stride` bytes from a row's to the next's.
///
/// # Safety
/// [`Tiles::wide`](super::Tiles::wide) is set; all that is named can be read, or written.
#[inline(always)]
pub(in crate::cpu) unsafe fn scores<const P: usize>(
    rows: *const u32,
    steps: usize,
    pages: [*const u16; P],
    out: *mut f32,
    stride: usize,
) {
    // For each page: its number, which its sum has too, and the register that takes it.
    macro_rules! with {
        ($($p:literal $page:literal),*) => {
            asm!(
                $(concat!("tilezero tmm", $p),)*
                "2:",
                "tileloadd tmm4, [{rows} + {row}]",
                "tileloadd tmm5, [{rows} + {row} + {tile}]",
                $(
                    concat!("mov {at}, [{pages} + 8 * ", $p, "]"),
                    "add {at}, {done}",
                    concat!("tileloadd tmm", $page, ", [{at} + {row}]"),
                    concat!("tdpbf16ps tmm", $p, ", tmm5, tmm", $page),
                    concat!("tdpbf16ps tmm", $p, ", tmm4, tmm", $page),
                )*
                "add {rows}, {terms} * {tile}",
                "add {done}, {tile}",
                "dec {steps}",
                "jnz 2b",
                $(concat!("tilestored [{out} + {stride} + {row_bytes} * ", $p, "], tmm", $p),)*
                rows = inout(reg) rows => _, steps = inout(reg) steps => _,
                pages = in(reg) pages.as_ptr(), done = inout(reg) 0usize => _,
                out = in(reg) out, stride = in(reg) stride,
                row = in(reg) ROW, row_bytes = const ROW, tile = const TILE, terms = const TERMS, at = out(reg) _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    const { assert!(TERMS == 2) };
    assert!(steps > 0, "no step");
    // SAFETY: the caller's promise.
    unsafe {
        match P {
            1 => with!(0 6),
            2 => with!(0 6, 1 7),
            3 => with!(0 6, 1 7, 2 6),
            4 => with!(0 6, 1 7, 2 6, 3 7),
            pages => unreachable!("{pages} pages"),
        }
    }
}

/// `out[r][16·c + d] += Σ_t weights[r][8·p + t] · pages[p][t][16·c + d]` for page after page
/// of 16 tokens, at least one, and `C` groups of 16 dimensions, 1 to 4; a t is a pair of
/// tokens in bf16. The weights' rows lie `weight_stride` bytes apart, a page's pairs
/// `pair_stride`, and results `stride`.
///
/// # Safety
/// [`Tiles::narrow`](super::Tiles::narrow) is set; all that is named can be read, or written.
#[inline(always)]
pub(in crate::cpu) unsafe fn weighted<const C: usize>(
    weights: *const u16,
    weight_stride: usize,
    pages: &[*const u16],
    pair_stride: usize,
    out: *mut f32,
    stride: usize,
) {
    // For each group: its number, which its sum has too, and the register that takes it.
    macro_rules! with {
        ($($c:literal $group:literal),*) => {
            asm!(
                $(concat!("tileloadd tmm", $c, ", [{out} + {stride} + {row_bytes} * ", $c, "]"),)*
                "2:",
                "mov {at}, [{pages}]",
                "tileloadd tmm4, [{weights} + {weight_stride}]",
                $(
                    concat!("tileloadd tmm", $group, ", [{at} + {pair_stride} + {row_bytes} * ", $c, "]"),
                    concat!("tdpbf16ps tmm", $c, ", tmm4, tmm", $group),
                )*
                "add {weights}, 32",
                "add {pages}, 8",
                "dec {left}",
                "jnz 2b",
                $(concat!("tilestored [{out} + {stride} + {row_bytes} * ", $c, "], tmm", $c),)*
                weights = inout(reg) weights => _, weight_stride = in(reg) weight_stride,
                pages = inout(reg) pages.as_ptr() => _, left = inout(reg) pages.len() => _,
                pair_stride = in(reg) pair_stride, out = in(reg) out, stride = in(reg) stride,
                row_bytes = const ROW, at = out(reg) _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                out("tmm6") _, out("tmm7") _,
                options(nostack),
            )
        };
    }
    assert!(!pages.is_empty(), "no page");
    // SAFETY: the caller's promise.
    unsafe {
        match C {
            1 => with!(0 6),
            2 => with!(0 6, 1 7),
            3 => with!(0 6, 1 7, 2 6),
            4 => with!(0 6, 1 7, 2 6, 3 7),
            groups => unreachable!("{groups} groups"),
        }
    }
}
