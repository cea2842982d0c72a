//! The product in the processor's own instructions.

use std::arch::{asm, x86_64::__cpuid_count};

use super::ROWS;

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

/// Registers 0 to 3 for sums and 4 for rows of the left side, so many of 64 bytes; 5 for the
/// right side, 16 rows.
///
/// # Safety
/// [`ask`] said yes; 1 to 16 rows.
pub(super) unsafe fn configure(rows: u8) {
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
    config.row_bytes[..6].fill(ROW as u16);
    config.rows[..5].fill(rows);
    config.rows[5] = ROWS as u8;
    // SAFETY: there are tiles, and the configuration is a valid one.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly)) }
}

/// # Safety
/// As for [`configure`].
pub(super) unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) }
}

/// # Safety
/// As for [`super::products`].
#[inline(always)]
pub(super) unsafe fn products<const T: usize>(
    rows: [*const u32; T],
    stride: usize,
    weights: *const u8,
    steps: usize,
    out: [*mut f32; T],
    out_stride: usize,
) {
    /// The loop, with these runs unrolled.
    macro_rules! with {
        ($($t:literal)*) => {
            asm!(
                $(concat!("tilezero tmm", $t),)*
                "2:",
                // What memory should bring by the time that it is needed.
                ".rept 16",
                r"prefetcht1 [{weights} + 8 * {tile} + 64 * \+]",
                ".endr",
                "tileloadd tmm5, [{weights} + {row}]",
                $(
                    concat!("mov {at}, [{rows} + 8 * ", $t, "]"),
                    "add {at}, {done}",
                    "tileloadd tmm4, [{at} + {stride}]",
                    concat!("tdpbf16ps tmm", $t, ", tmm4, tmm5"),
                )*
                "add {weights}, {tile}",
                "add {done}, {row}",
                "dec {steps}",
                "jnz 2b",
                $(
                    concat!("mov {at}, [{out} + 8 * ", $t, "]"),
                    concat!("tilestored [{at} + {out_stride}], tmm", $t),
                )*
                rows = in(reg) rows.as_ptr(), stride = in(reg) stride, done = inout(reg) 0usize => _,
                weights = inout(reg) weights => _, steps = inout(reg) steps => _,
                out = in(reg) out.as_ptr(), out_stride = in(reg) out_stride,
                row = in(reg) ROW, tile = const TILE, at = out(reg) _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                options(nostack),
            )
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        match T {
            1 => with!(0),
            2 => with!(0 1),
            3 => with!(0 1 2),
            4 => with!(0 1 2 3),
            _ => unreachable!("{T} runs of rows"),
        }
    }
}
