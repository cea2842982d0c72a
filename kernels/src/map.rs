//! A file as bytes in memory, read as it is touched.

use std::{fs::File, io, ops::Deref, path::Path};

use memmap2::Mmap;

/// A file mapped read-only.
#[derive(Debug)]
pub struct MappedFile(Mmap);

impl MappedFile {
    /// Maps a whole file.
    ///
    /// The file must not be truncated while it is mapped: a read past its new
    /// end kills the process. Replace a checkpoint by renaming over it.
    ///
    /// # Errors
    /// When the file cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only and private to us, and `Deref` gives
        // no more than shared bytes, whose every value is valid. What remains is
        // another process that writes to the file meanwhile: it can change the
        // bytes that we read, as it could for `read`, and none of our code
        // trusts them to be the same twice for its memory safety.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self(map))
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_what_the_file_holds() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let mapped = MappedFile::open(&here).unwrap();
        assert_eq!(&*mapped, std::fs::read(&here).unwrap());
        let missing = MappedFile::open(Path::new("no/such/file")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }
}
