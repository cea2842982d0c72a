//! Plain weights made smaller as they are read.

use std::str::FromStr;

use forkpoint_kernels::{Backend, Format, HostMatrix, quantize};

use super::{Checkpoint, LoadError};
use crate::error::StartError;

/// What the matrices of a bf16, f16 or f32 checkpoint are packed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quantize {
    /// Eight bits and an f16 for each 32 weights ([`Format::Q8_0`]).
    Int8,
    /// Four bits and two f16 for each 32 weights ([`Format::Q4_1`]); the
    /// embedding and the head, off which every answer is read, in eight bits.
    Int4,
}

impl Quantize {
    /// The word for it in flags and files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }

    /// What a matrix of plain numbers becomes.
    fn format(self, tensor: &str) -> Format {
        match self {
            Self::Int4 if !matches!(tensor, "token_embd.weight" | "output.weight") => Format::Q4_1,
            Self::Int8 | Self::Int4 => Format::Q8_0,
        }
    }
}

impl FromStr for Quantize {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        [Self::Int8, Self::Int4]
            .into_iter()
            .find(|quantize| quantize.name() == word)
            .ok_or_else(|| format!("must be int8 or int4, got {word:?}"))
    }
}

fn is_plain(format: Format) -> bool {
    matches!(format, Format::F32 | Format::F16 | Format::BF16)
}

impl Checkpoint {
    /// Packs the matrices as they are uploaded.
    ///
    /// # Errors
    /// When none of them is of plain numbers: what is quantised already would
    /// only lose by being quantised again.
    pub fn quantized(mut self, quantize: Quantize) -> Result<Self, LoadError> {
        let matrices = || self.tensors.values().filter(|tensor| tensor.shape.len() == 2);
        if !matrices().any(|tensor| is_plain(tensor.format)) {
            let got = matrices().next().map_or("none", |tensor| tensor.format.name());
            let what = format!("the type of weights to quantise to {},", quantize.name());
            return Err(self.at().invalid(what, "BF16, F16 or F32", got));
        }
        self.quantize = Some(quantize);
        Ok(self)
    }

    /// Gives a matrix to a device, packed first where that was asked for. Rows
    /// that do not divide into blocks stay as they are.
    pub(crate) fn upload<B: Backend>(&self, name: &str, device: &mut B) -> Result<B::Matrix, StartError> {
        let matrix = self.matrix(name)?;
        let Some(format) = self.quantize.map(|quantize| quantize.format(name)) else {
            return Ok(device.matrix(&matrix)?);
        };
        if !is_plain(matrix.format()) || !matrix.cols().is_multiple_of(format.block()) {
            return Ok(device.matrix(&matrix)?);
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let packed = quantize(&matrix, format, threads)?;
        Ok(device.matrix(&HostMatrix::new(format, matrix.rows(), matrix.cols(), &packed)?)?)
    }
}
