//! `berth.toml`: how a driver is built and run, which `berth new` writes.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The name of the file, in the driver's directory.
pub const FILE: &str = "berth.toml";

/// What `berth.toml` says of a driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Project {
    /// The driver's name, as GetPluginInfo answers it.
    #[serde(default)]
    pub name: String,
    /// The command that builds it; nothing to do if empty.
    #[serde(default)]
    pub build: String,
    /// The command that runs it.
    #[serde(default)]
    pub run: String,
    /// Files and directories that are built again when they change.
    #[serde(default)]
    pub watch: Vec<PathBuf>,
    /// The parameters of its StorageClass.
    #[serde(default)]
    pub class: BTreeMap<String, String>,
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProjectError {
    /// It cannot be read.
    #[error("read {}", path.display())]
    Read {
        /// The path of the file that was to be read.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is not what it should be.
    #[error("{}: {message}", path.display())]
    Content {
        /// The path of the file that was to be read.
        path: PathBuf,
        /// What is wrong, with its line.
        message: String,
    },
}

impl Project {
    /// Reads the file of a directory, if it has one.
    pub fn find(directory: &Path) -> Result<Option<Self>, ProjectError> {
        let path = directory.join(FILE);
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                Self::parse(&text).map(Some).map_err(|message| ProjectError::Content { path, message })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ProjectError::Read { path, source }),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| error.to_string().trim().replace('\n', " "))
    }

    /// The words of the command that runs it.
    pub fn command(&self) -> Result<Vec<String>, String> {
        words(&self.run)
    }
}

/// The words of a command, with single and double quotes as in a shell; nothing else is special.
pub fn words(command: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in command.chars() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, _) if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    if let Some(open) = quote {
        return Err(format!("a {open} is not closed in the command {command:?}"));
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_berth_new_is_read() {
        let text = "name = \"a.example.com\"\nbuild = \"\"\nrun = \"env A=1 ./driver {dir}\"\nwatch = [\"src\"]\n\n[class]\nmode = \"0777\"\n";
        let project = Project::parse(text).unwrap();
        assert_eq!(project.name, "a.example.com");
        assert_eq!(project.command().unwrap(), ["env", "A=1", "./driver", "{dir}"]);
        assert_eq!(
            (project.watch, project.class),
            (vec!["src".into()], [("mode".to_owned(), "0777".to_owned())].into())
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, says) in [("nmae = \"a\"", "nmae"), ("run = 3", "run"), ("run = ", "line 1")] {
            let error = Project::parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn quotes_hold_words_together() {
        assert_eq!(words("sh -c 'exec \"$A\" b' \"\"").unwrap(), ["sh", "-c", "exec \"$A\" b", ""]);
        assert!(words("sh -c 'x").unwrap_err().contains("not closed"));
    }
}
