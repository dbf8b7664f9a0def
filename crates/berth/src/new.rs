//! `berth new NAME`: a driver that runs, with examples, manifests and a check, in a directory of its own.
//!
//! The files are those of `templates/`, in which `@NAME@` and other words are replaced. A driver in Rust gets the sources of the framework, which
//! `build.rs` packs into this program. Everything is written beside the directory and renamed into place, so that a failure leaves nothing.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};

use anyhow::Context as _;
use clap::{Args as ClapArgs, ValueEnum};

/// The sources of the framework, as `build.rs` packs them.
const FRAMEWORK: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/framework.gz"));
/// The longest name: objects are called after it, with something behind.
const LONGEST: usize = 40;
/// The exit status for what cannot be made as it was asked for.
const WRONG: u8 = 2;

/// Make the sources of a driver in a directory of its own.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// What the driver is called: small letters, digits and dashes; also the directory that is made
    #[arg(value_name = "NAME")]
    name: String,

    /// In which language [default: rust; for --kind flex, shell]
    #[arg(long, value_enum)]
    lang: Option<Lang>,

    /// What Kubernetes uses it by
    #[arg(long, value_enum, default_value_t = Kind::Csi)]
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Lang {
    /// On the framework berth-driver, whose sources come with it
    Rust,
    /// On the CSI module
    Go,
    /// A program that `berth driver exec` runs
    Python,
    /// A program that `berth driver exec` runs
    Shell,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A CSI driver, as drivers are written now
    Csi,
    /// A FlexVolume driver, which is deprecated
    Flex,
}

/// A file to write: its path, its text, and whether it is a program.
type File = (String, String, bool);

macro_rules! template {
    ($path:literal) => {
        include_str!(concat!("../templates/", $path))
    };
}

/// Makes the directory; bad input is one sentence and exit status 2.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let lang = args.lang.unwrap_or(if args.kind == Kind::Flex { Lang::Shell } else { Lang::Rust });
    let directory = PathBuf::from(&args.name);
    if let Err(sentence) = check(&args.name, lang, args.kind, &directory) {
        eprintln!("berth: {sentence}");
        return Ok(ExitCode::from(WRONG));
    }
    let files = match args.kind {
        Kind::Csi => csi(&args.name, lang),
        Kind::Flex => flex(&args.name, lang),
    };
    write(&directory, &files, lang == Lang::Rust)?;
    if let Some(tool) = lang.tool().filter(|tool| !is_installed(tool)) {
        eprintln!("berth: warning: {tool} is not installed here, and the driver needs it");
    }
    println!("{} is in {}; README.md there says what to do next.", args.name, directory.display());
    Ok(ExitCode::SUCCESS)
}

fn check(name: &str, lang: Lang, kind: Kind, directory: &Path) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) || name.ends_with('-') || !name.chars().all(plain)
    {
        return Err(format!(
            "{name:?} cannot be a driver's name: small letters, digits and dashes, a letter first, no dash last"
        ));
    }
    if name.len() > LONGEST {
        return Err(format!("the name {name:?} is longer than {LONGEST} letters"));
    }
    if kind == Kind::Flex && matches!(lang, Lang::Rust | Lang::Go) {
        return Err("a FlexVolume driver is a script; use --lang shell or --lang python".to_owned());
    }
    match fs::read_dir(directory).map(|mut entries| entries.next().is_some()) {
        Ok(false) => Ok(()),
        Ok(true) => Err(format!("the directory {} exists and is not empty", directory.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("{} is in the way: {error}", directory.display())),
    }
}

impl Lang {
    /// What is needed to build or run it.
    fn tool(self) -> Option<&'static str> {
        match self {
            Self::Rust => Some("cargo"),
            Self::Go => Some("go"),
            Self::Python => Some("python3"),
            Self::Shell => None,
        }
    }
}

fn is_installed(tool: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|directory| directory.join(tool).is_file())
}

/// The words that are replaced in the templates of a CSI driver.
struct Words {
    build: &'static str,
    run: &'static str,
    serve: String,
    command: &'static str,
    source: &'static str,
    watch: &'static str,
    what: &'static str,
    has_mode: bool,
}

impl Words {
    fn of(name: &str, lang: Lang) -> Self {
        let exec = |stays: &str| {
            format!("berth driver exec{stays} --program ./driver --state-dir /var/lib/{name}-state")
        };
        match lang {
            Lang::Rust => Self {
                build: "cargo build",
                run: "env ROOT={dir}/root STATE_DIR={dir}/state ./target/debug/driver",
                serve: "./target/debug/driver".to_owned(),
                command: "/driver",
                source: "src/main.rs",
                watch: "\"src\", \"Cargo.toml\"",
                what: "It is written in Rust on the framework `berth-driver`, whose sources are in `framework/`.",
                has_mode: true,
            },
            Lang::Go => Self {
                build: "go build -o driver .",
                run: "env ROOT={dir}/root ./driver",
                serve: "./driver".to_owned(),
                command: "/driver",
                source: "main.go",
                watch: "\"main.go\", \"go.mod\"",
                what: "It is written in Go on the CSI module; nothing has to be generated.",
                has_mode: false,
            },
            Lang::Python => Self {
                build: "",
                run: "env ROOT={dir}/root berth driver exec --stays --program ./driver --state-dir {dir}/state",
                serve: exec(" --stays"),
                command: "berth, driver, exec, --stays, --program=/driver, --state-dir=$(STATE_DIR)",
                source: "driver",
                watch: "\"driver\"",
                what: "It is a Python program that `berth driver exec` runs: one line of JSON in and out for each operation.",
                has_mode: true,
            },
            Lang::Shell => Self {
                build: "",
                run: "env ROOT={dir}/root berth driver exec --program ./driver --state-dir {dir}/state",
                serve: exec(""),
                command: "berth, driver, exec, --program=/driver, --state-dir=$(STATE_DIR)",
                source: "driver",
                watch: "\"driver\"",
                what: "It is a shell script that `berth driver exec` runs: JSON in and out for each operation.",
                has_mode: true,
            },
        }
    }

    fn fill(&self, name: &str, text: &str) -> String {
        let (class, parameters) =
            if self.has_mode { ("mode = \"0777\"", "parameters:\n  mode: \"0777\"\n") } else { ("", "") };
        [
            ("@DRIVER@", &*format!("{name}.example.com")),
            ("@CI_BUILD@", if self.build.is_empty() { "chmod +x driver" } else { self.build }),
            ("@BUILD@", self.build),
            ("@RUN@", self.run),
            ("@SERVE@", &self.serve),
            ("@COMMAND@", self.command),
            ("@SOURCE@", self.source),
            ("@WATCH@", self.watch),
            ("@WHAT@", self.what),
            ("@CLASS@", class),
            ("@PARAMETERS@", parameters),
            ("@EXPANSION@", if self.has_mode { "true" } else { "false" }),
            ("@NAME@", name),
        ]
        .into_iter()
        .fold(text.to_owned(), |text, (word, value)| text.replace(word, value))
    }
}

fn csi(name: &str, lang: Lang) -> Vec<File> {
    let words = Words::of(name, lang);
    let own: &[(&str, &str, bool)] = match lang {
        Lang::Rust => &[
            ("Cargo.toml", template!("rust/Cargo.toml.in"), false),
            ("src/main.rs", template!("rust/main.rs"), false),
            (".gitignore", "/target\n", false),
        ],
        Lang::Go => &[
            ("go.mod", template!("go/go.mod.in"), false),
            ("go.sum", template!("go/go.sum"), false),
            ("main.go", template!("go/main.go"), false),
            (".gitignore", "/driver\n", false),
        ],
        Lang::Python => &[("driver", template!("python/driver"), true)],
        Lang::Shell => &[("driver", template!("shell/driver"), true)],
    };
    let common = [
        ("berth.toml", template!("common/berth.toml")),
        ("README.md", template!("common/README.md")),
        (".github/workflows/ci.yaml", template!("common/ci.yaml")),
        ("examples/class.yaml", template!("common/examples/class.yaml")),
        ("examples/claim.yaml", template!("common/examples/claim.yaml")),
        ("examples/pod.yaml", template!("common/examples/pod.yaml")),
        ("deploy/csidriver.yaml", template!("common/deploy/csidriver.yaml")),
        ("deploy/rbac.yaml", template!("common/deploy/rbac.yaml")),
        ("deploy/controller.yaml", template!("common/deploy/controller.yaml")),
        ("deploy/node.yaml", template!("common/deploy/node.yaml")),
    ];
    let common = common.into_iter().map(|(path, text)| (path, text, false));
    let all = own.iter().copied().chain(common);
    all.map(|(path, text, program)| (path.to_owned(), words.fill(name, text), program)).collect()
}

fn flex(name: &str, lang: Lang) -> Vec<File> {
    let driver = if lang == Lang::Python { template!("flex/python") } else { template!("flex/shell") };
    let program = format!("example.com~{name}/{name}");
    let words = Words {
        build: "",
        run: "env ROOT={dir}/root berth driver flex --plugin example.com~@NAME@/@NAME@ --state-dir {dir}/state",
        serve: String::new(),
        command: "",
        source: "",
        watch: "\"example.com~@NAME@\"",
        what: "",
        has_mode: false,
    };
    let files = [
        ("README.md", template!("flex/README.md")),
        ("berth.toml", template!("common/berth.toml")),
        (".github/workflows/ci.yaml", template!("common/ci.yaml")),
        ("examples/pod.yaml", template!("flex/pod.yaml")),
        ("deploy/install.yaml", template!("flex/install.yaml")),
    ];
    let files = files.map(|(path, text)| (path.to_owned(), text, false));
    let all = files.into_iter().chain([(program, driver, true)]);
    let driver_name = format!("{name}.example.com.flex.berth.dev");
    let fill = |text: &str| {
        let text = text.replace("@DRIVER@", &driver_name);
        let text = text.replace("chmod +x driver", &format!("chmod +x example.com~{name}/{name}"));
        let class = "directory = \"${volume.id}\"";
        let text = text.replace("@CLASS@", class).replace("@CI_BUILD@", "chmod +x example.com~@NAME@/@NAME@");
        words.fill(name, &text)
    };
    all.map(|(path, text, program)| (path, fill(text), program)).collect()
}

/// Writes everything beside the directory, and renames it into place.
fn write(directory: &Path, files: &[File], with_framework: bool) -> anyhow::Result<()> {
    let name = directory.file_name().context("a name is a file name")?.to_string_lossy().into_owned();
    let incoming = PathBuf::from(format!(".{name}.{}.incoming", std::process::id()));
    let written = (|| {
        for (path, text, program) in files {
            put(&incoming, path, text.as_bytes(), *program)?;
        }
        if with_framework {
            for (path, content) in framework()? {
                // The versions that the framework was tested with are the driver's.
                let path = if path == "Cargo.lock" { path } else { format!("framework/{path}") };
                put(&incoming, &path, &content, false)?;
            }
        }
        fs::rename(&incoming, directory).with_context(|| format!("make {}", directory.display()))
    })();
    if written.is_err() {
        let _ = fs::remove_dir_all(&incoming);
    }
    written
}

fn put(directory: &Path, path: &str, content: &[u8], program: bool) -> anyhow::Result<()> {
    let path = directory.join(path);
    let failed = || format!("write {}", path.display());
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).with_context(failed)?;
    }
    fs::write(&path, content).with_context(failed)?;
    let mode = if program { 0o755 } else { 0o644 };
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).with_context(failed)
}

/// The files that `build.rs` has packed.
fn framework() -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let mut archive = Vec::new();
    flate2::read::GzDecoder::new(FRAMEWORK).read_to_end(&mut archive).context("unpack the framework")?;
    let (mut rest, mut files) = (&archive[..], Vec::new());
    while !rest.is_empty() {
        let path = String::from_utf8(part(&mut rest)?).context("unpack the framework")?;
        files.push((path, part(&mut rest)?));
    }
    Ok(files)
}

fn part(rest: &mut &[u8]) -> anyhow::Result<Vec<u8>> {
    let (length, after) = rest.split_first_chunk::<4>().context("the packed framework is cut off")?;
    let length = usize::try_from(u32::from_le_bytes(*length))?;
    let (content, after) = after.split_at_checked(length).context("the packed framework is cut off")?;
    *rest = after;
    Ok(content.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_kinds_and_directories_that_do_not_do_are_refused_in_a_sentence() {
        let directory = tempfile::tempdir().unwrap();
        let free = directory.path().join("free");
        let refused =
            |name: &str, lang, kind, at: &Path| check(name, lang, kind, at).err().unwrap_or_default();
        for name in ["", "-a", "a-", "A", "a_b", "a.b", "1a", "../a", "a b"] {
            let why = refused(name, Lang::Shell, Kind::Csi, &free);
            assert!(why.contains("cannot be a driver's name"), "{name}: {why}");
        }
        assert!(refused(&"a".repeat(41), Lang::Shell, Kind::Csi, &free).contains("longer than 40"));
        assert!(refused("a", Lang::Rust, Kind::Flex, &free).contains("--lang shell"));
        assert_eq!(refused("a", Lang::Python, Kind::Flex, &free), "");
        assert_eq!(refused("a", Lang::Go, Kind::Csi, directory.path()), "", "an empty directory is used");
        fs::write(directory.path().join("file"), "").unwrap();
        assert!(refused("a", Lang::Go, Kind::Csi, directory.path()).contains("is not empty"));
        assert!(refused("a", Lang::Go, Kind::Csi, &directory.path().join("file")).contains("in the way"));
    }

    #[test]
    fn every_word_is_replaced_and_the_budgets_of_lines_hold() {
        for (lang, most) in [(Lang::Rust, 120), (Lang::Go, usize::MAX), (Lang::Python, 60), (Lang::Shell, 60)]
        {
            let files = csi("mydriver", lang);
            for (path, text, _) in &files {
                let words = text.split('@').skip(1).step_by(2);
                let left: Vec<_> = words
                    .filter(|word| {
                        word.chars().all(|c| c.is_ascii_uppercase() || c == '_') && !word.is_empty()
                    })
                    .collect();
                assert!(left.is_empty(), "{path}: {left:?}");
            }
            let source = Words::of("mydriver", lang).source;
            let lines = files.iter().find(|(path, ..)| path == source).unwrap().1.lines().count();
            assert!(lines <= most, "{source}: {lines} lines");
        }
        for lang in [Lang::Shell, Lang::Python] {
            assert!(
                flex("mydriver", lang)
                    .iter()
                    .all(|(_, text, _)| !text.contains("@NAME@") && !text.contains("@RUN@"))
            );
        }
    }

    #[test]
    fn the_framework_is_carried_whole() {
        let files = framework().unwrap();
        let has = |wanted: &str| files.iter().any(|(path, _)| path == wanted);
        for path in
            ["Cargo.toml", "Cargo.lock", "crates/berth-driver/src/lib.rs", "crates/berth-host/Cargo.toml"]
        {
            assert!(has(path), "{path}");
        }
        assert!(!files.iter().any(|(path, _)| path.contains("/tests")));
    }
}
