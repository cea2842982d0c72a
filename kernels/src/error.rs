//! What can go wrong between a file and a kernel.

/// Why a device could not take a weight or give memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The bytes do not make up the matrix that was announced.
    #[error("a {rows} x {cols} matrix in {format} needs {expected} bytes, got {got}")]
    Size {
        /// The format's name.
        format: &'static str,
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
        /// Bytes that the shape needs.
        expected: usize,
        /// Bytes that were there.
        got: usize,
    },
    /// A row does not divide into the format's blocks.
    #[error("{format} packs {block} numbers a block, which does not divide rows of {cols}")]
    Blocks {
        /// The format's name.
        format: &'static str,
        /// Numbers in a block.
        block: usize,
        /// Inputs.
        cols: usize,
    },
    /// A shape that no kernel supports.
    #[error("{what} must be {expected}, got {got}")]
    Shape {
        /// Which dimension.
        what: &'static str,
        /// What is supported.
        expected: &'static str,
        /// What came.
        got: usize,
    },
    /// The processor lacks what a forced path needs.
    #[error("FORKPOINT_CPU={path} needs {needs}, which this processor or system lacks")]
    Path {
        /// The path that was asked for.
        path: &'static str,
        /// The missing features.
        needs: &'static str,
    },
    /// `FORKPOINT_CPU` holds a word that names no path.
    #[error("FORKPOINT_CPU must be scalar, avx2, avxvnni, avx512, avx512bf16 or amx, got {0:?}")]
    UnknownPath(String),
    /// The operating system refused memory.
    #[error("cannot reserve {bytes} bytes: {source}")]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// The system's word.
        source: std::io::Error,
    },
}
