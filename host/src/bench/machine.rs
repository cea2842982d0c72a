//! The machine that a bench ran on.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::date::date;

/// A load average up to this share of the cores leaves the figures usable.
const QUIET: f64 = 0.15;

/// What figures depend on besides the program.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Machine {
    /// The processor's name, where the system tells it.
    pub(super) cpu: Option<String>,
    /// Threads that may run at once.
    pub(super) cores: usize,
    /// Processes that ran or waited to, on average over the last minute, when the bench started.
    pub(super) load_average: Option<f64>,
    /// Whether the machine had nothing else to do, as far as the load average tells.
    pub(super) quiet: bool,
}

impl Machine {
    pub(super) fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let load_average = read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok());
        Self {
            cpu: cpu_name(&read("/proc/cpuinfo")),
            cores,
            load_average,
            quiet: load_average.is_none_or(|load: f64| load <= QUIET * cores as f64),
        }
    }
}

fn cpu_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The most memory that this process has held at once, in bytes.
pub(super) fn peak_memory() -> Option<u64> {
    kilobytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Memory that programs can still have without swapping, in bytes.
pub(super) fn available_memory() -> Option<u64> {
    kilobytes(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// A line "NAME  123 kB" of the files under /proc.
fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Bytes of a file, or of all files of a folder, not of folders in it.
pub(super) fn file_bytes(path: &Path) -> u64 {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |meta| meta.len());
    match std::fs::read_dir(path) {
        Ok(entries) => entries
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.is_file())
            .map(|path| size(&path))
            .sum(),
        Err(_) => size(path),
    }
}

/// The time in UTC, as ISO 8601 writes it.
pub(super) fn utc(time: SystemTime) -> String {
    let second = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() % 86_400;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{}T{hour:02}:{minute:02}:{second:02}Z", date(time))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| utc(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(at(1_000_000_000), "2001-09-09T01:46:40Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn lines_of_proc_are_read() {
        assert_eq!(kilobytes("VmPeak:\t  9 kB\nVmHWM:\t    12 kB\n", "VmHWM:"), Some(12 << 10));
        assert_eq!(kilobytes("VmHWM:\t 12 pages", "VmHWM:"), None);
        assert_eq!(cpu_name("processor\t: 0\nmodel name\t: Some CPU @ 2\n"), Some("Some CPU @ 2".into()));
        assert_eq!(cpu_name(""), None);
    }

    #[test]
    fn a_folder_weighs_what_its_files_weigh() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), [0; 5]).unwrap();
        std::fs::write(folder.path().join("b"), [0; 7]).unwrap();
        assert_eq!(file_bytes(folder.path()), 12);
        assert_eq!(file_bytes(&folder.path().join("b")), 7);
        assert_eq!(file_bytes(Path::new("/no/such")), 0);
    }
}
