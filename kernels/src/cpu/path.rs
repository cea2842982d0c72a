//! Which instructions the kernels use.

#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::KernelError;

/// A family of kernels, chosen once at run time.
///
/// With the feature `emulate-avx512`, for tests, plain Rust stands in for AVX-512,
/// AVX-VNNI and AMX, and their paths are available wherever AVX2 is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Plain Rust: the reference, and what any processor runs.
    Scalar,
    /// AVX2, FMA and F16C: x86-64-v3.
    Avx2,
    /// AVX2, with AVX-VNNI for the products of int8.
    AvxVnni,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// AVX-512 as above and BF16, which multiplies bf16 weights.
    Avx512Bf16,
    /// All of that and AMX, whose tiles multiply bf16 weights.
    Amx,
}

impl Path {
    /// All paths, the fastest first.
    pub const ALL: [Self; 6] =
        [Self::Amx, Self::Avx512Bf16, Self::Avx512, Self::AvxVnni, Self::Avx2, Self::Scalar];

    /// The word for it in `FORKPOINT_CPU`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avxvnni",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512bf16",
            Self::Amx => "amx",
        }
    }

    /// The features that it needs.
    pub(super) const fn needs(self) -> &'static str {
        match self {
            Self::Scalar => "nothing",
            Self::Avx2 => "avx2, fma and f16c",
            Self::AvxVnni => "avxvnni, avx2, fma and f16c",
            Self::Avx512 => "avx512f, avx512bw, avx512vl, avx512vnni, avx2, fma and f16c",
            Self::Avx512Bf16 => "avx512bf16 and what avx512 needs",
            Self::Amx => "amx-tile, amx-bf16, Linux's permission to use them and what avx512bf16 needs",
        }
    }

    /// Whether this processor, under this system, can run it. Of AMX's tiles that asks the
    /// system for the permission to use them, for the whole process.
    #[must_use]
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            match self {
                Self::Scalar => true,
                Self::Avx2 => avx2,
                _ if self.is_emulated() => avx2,
                Self::AvxVnni => avx2 && is_x86_feature_detected!("avxvnni"),
                Self::Avx512 => {
                    avx2 && is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512vl")
                        && is_x86_feature_detected!("avx512vnni")
                }
                Self::Avx512Bf16 => Self::Avx512.available() && is_x86_feature_detected!("avx512bf16"),
                Self::Amx => Self::Avx512Bf16.available() && tiles::available(),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Scalar
        }
    }

    /// The path that `FORKPOINT_CPU` forces, else the best there is.
    pub(super) fn detect() -> Result<Self, KernelError> {
        let Some(forced) = std::env::var_os("FORKPOINT_CPU") else {
            let best = Self::ALL.into_iter().find(|path| path.available() && !path.is_emulated());
            return Ok(best.expect("scalar code runs anywhere"));
        };
        let word = forced.to_string_lossy();
        Self::named(&word).ok_or_else(|| KernelError::UnknownPath(word.into_owned()))
    }

    /// Whether plain Rust stands in for its instructions: a path for tests,
    /// taken only when it is asked for.
    const fn is_emulated(self) -> bool {
        cfg!(feature = "emulate-avx512") && !matches!(self, Self::Scalar | Self::Avx2)
    }

    /// Whether products of bf16 weights take activations rounded to bf16.
    pub(super) const fn has_bf16(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx)
    }

    fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == word)
    }
}

/// Defines a function over plain slices that is compiled once for each path and
/// called with the path first. The compiler vectorises the body; it never
/// reorders or contracts floating point, so results are the same on each.
macro_rules! vectorised {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        pub(crate) fn $name(path: $crate::cpu::Path, $($arg: $type),*) {
            #[inline(always)]
            fn body($($arg: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $type),*) {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[cfg_attr(not(feature = "emulate-avx512"), target_feature(enable = "avx512f,avx512bw,avx512vl"))]
            fn avx512($($arg: $type),*) {
                body($($arg),*)
            }

            match path {
                // SAFETY: a `Cpu` takes a path only if the processor has it.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Path::Avx2 | $crate::cpu::Path::AvxVnni => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                #[cfg_attr(feature = "emulate-avx512", expect(unused_unsafe, reason = "plain Rust stands in"))]
                $crate::cpu::Path::Avx512 | $crate::cpu::Path::Avx512Bf16 | $crate::cpu::Path::Amx => unsafe {
                    avx512($($arg),*)
                },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use vectorised;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words() {
        assert_eq!(Path::named("avx2"), Some(Path::Avx2));
        assert_eq!(Path::named("AVX2"), None);
        assert!(Path::Scalar.available());
    }
}
