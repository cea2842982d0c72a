//! The files of a journal: lines are appended to the newest, which is followed by another once it is large; the
//! oldest go once all are too large together.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// A journal's folder, with its newest file open.
pub(super) struct Files {
    dir: PathBuf,
    max_file: u64,
    max_total: u64,
    number: u64,
    file: File,
    bytes: u64,
    /// One server writes a journal at a time.
    _lock: File,
}

/// The journal's files in a folder, oldest first, with their numbers.
pub(super) fn list(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let number = name.and_then(|name| name.strip_prefix("journal-")?.strip_suffix(".jsonl"));
        if let Some(number) = number.and_then(|number| number.parse().ok()) {
            files.push((number, path));
        }
    }
    files.sort();
    Ok(files)
}

impl Files {
    /// Opens a folder, and makes it where it is missing.
    pub(super) fn open(dir: &Path, max_file: u64, max_total: u64) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(dir.join("lock"))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::other("another server writes it"),
            TryLockError::Error(error) => error,
        })?;
        let number = list(dir)?.last().map_or(1, |(number, _)| *number);
        let (file, bytes) = open_file(dir, number)?;
        Ok(Self { dir: dir.to_owned(), max_file, max_total, number, file, bytes, _lock: lock })
    }

    /// Appends a line, whole, to the newest file.
    pub(super) fn append(&mut self, line: &str) -> io::Result<()> {
        let line = format!("{line}\n");
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.max_file {
            self.next(self.number + 1)?;
            if let Err(error) = self.make_room() {
                tracing::warn!(%error, "the journal's oldest files are not removed");
            }
        } else if !path_of(&self.dir, self.number).exists() {
            // Removed by someone: what is written into it would be nowhere.
            fs::create_dir_all(&self.dir)?;
            self.next(self.number)?;
        }
        if let Err(error) = self.file.write_all(line.as_bytes()) {
            // A full disk may have taken a part: the next line must not be glued to it.
            let _ = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.bytes += line.len() as u64;
        Ok(())
    }

    fn next(&mut self, number: u64) -> io::Result<()> {
        let (file, bytes) = open_file(&self.dir, number)?;
        (self.file, self.bytes, self.number) = (file, bytes, number);
        Ok(())
    }

    /// Removes the oldest files until a whole new one fits.
    fn make_room(&self) -> io::Result<()> {
        let mut files = list(&self.dir)?;
        files.retain(|(number, _)| *number != self.number);
        let size = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.len());
        let mut total = self.max_file + files.iter().map(|(_, path)| size(path)).sum::<u64>();
        for (_, path) in files {
            if total <= self.max_total {
                break;
            }
            total -= size(&path).min(total);
            fs::remove_file(path)?;
        }
        Ok(())
    }
}

fn path_of(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("journal-{number:06}.jsonl"))
}

/// Opens a file to append to. What a crash left of a last line is cut off.
fn open_file(dir: &Path, number: u64) -> io::Result<(File, u64)> {
    let mut options = OpenOptions::new();
    options.create(true).read(true).append(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // It may hold prompts.
        options.mode(0o600);
    }
    let mut file = options.open(path_of(dir, number))?;
    let mut bytes = file.metadata()?.len();
    let mut block = vec![0; 1 << 16];
    while bytes > 0 {
        let from = bytes.saturating_sub(block.len() as u64);
        let part = &mut block[..usize::try_from(bytes - from).unwrap_or_default()];
        file.seek(SeekFrom::Start(from))?;
        file.read_exact(part)?;
        match part.iter().rposition(|&byte| byte == b'\n') {
            Some(end) => {
                bytes = from + end as u64 + 1;
                break;
            }
            None => bytes = from,
        }
    }
    file.set_len(bytes)?;
    Ok((file, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(dir: &Path) -> Vec<String> {
        list(dir).unwrap().into_iter().map(|(_, path)| fs::read_to_string(path).unwrap()).collect()
    }

    #[test]
    fn files_follow_each_other_and_the_oldest_go() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Files::open(folder.path(), 10, 26).unwrap();
        for line in ["aaaa", "bbbb", "cccc", "dddddddddddddd", "eeee"] {
            files.append(line).unwrap();
        }
        assert_eq!(text(folder.path()), ["dddddddddddddd\n", "eeee\n"]);
        drop(files);
        let mut files = Files::open(folder.path(), 100, 200).unwrap();
        files.append("ffff").unwrap();
        assert_eq!(text(folder.path())[1], "eeee\nffff\n", "the newest is continued");
        let second = Files::open(folder.path(), 100, 200).err().expect("one server at a time");
        assert!(second.to_string().contains("another server"), "{second}");
    }

    #[test]
    fn half_a_line_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        for (left, want) in [("whole\nhal", "whole\nnew\n"), ("hal", "new\n"), ("", "new\n")] {
            fs::write(path_of(folder.path(), 1), left).unwrap();
            Files::open(folder.path(), 100, 200).unwrap().append("new").unwrap();
            assert_eq!(text(folder.path()), [want]);
        }
    }

    #[test]
    fn a_file_that_was_removed_is_made_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = Files::open(folder.path(), 100, 200).unwrap();
        files.append("one").unwrap();
        fs::remove_file(path_of(folder.path(), 1)).unwrap();
        files.append("two").unwrap();
        assert_eq!(text(folder.path()), ["two\n"]);
    }
}
