//! Reads the corpus: requests in a format of their own, short to write and to read.
//!
//! A file is read from top to bottom; a line that starts with `#` is a comment.
//!
//! - `let NAME TEXT`: `{NAME}` stands for the text from here on, in this file.
//! - `base NAME`, then indented YAML: a body that requests start from.
//! - `METHOD PATH [as FORMAT] [want FORMAT] [take N] [await] [setup]`: a request. `as` is the body's format, `want` the
//!   answer's, `take` reads N events of a watch, `await` asks until it is not answered by 404, `setup` leaves the answer out of
//!   the comparison. Indented below:
//!   - `> save NAME POINTER`: `{NAME}` stands for that part of the answer from here on, on each server its own;
//!   - `> header NAME: VALUE`;
//!   - `> managed`: compares `metadata.managedFields`, too;
//!   - `> differs POINTER WHY`: what is below the pointer may differ (the reason is told in `DIFFERENCES.md`);
//!   - the body: YAML, `BASE`, `BASE + YAML` (a merge patch on the base), or `raw TEXT`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;

/// One request of the corpus, with what is needed to send it to either server.
#[derive(Debug)]
pub(crate) struct Step {
    /// What names it in records and messages: the file, a number, method and path.
    pub(crate) id: String,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) body: Text,
    pub(crate) body_format: Option<String>,
    pub(crate) wanted_format: Option<String>,
    pub(crate) take: Option<usize>,
    pub(crate) setup: bool,
    pub(crate) await_found: bool,
    pub(crate) headers: Vec<(String, String)>,
    /// Names and JSON pointers.
    pub(crate) saves: Vec<(String, String)>,
    pub(crate) managed: bool,
    /// JSON pointers below which the answers may differ.
    pub(crate) differs: Vec<String>,
}

/// A body before saved values are put in.
#[derive(Debug)]
pub(crate) enum Text {
    None,
    Raw(String),
    Json(Value),
}

#[derive(Default)]
struct File {
    name: String,
    texts: BTreeMap<String, String>,
    bases: BTreeMap<String, Value>,
    steps: Vec<Step>,
}

/// All steps of all files, in the order of their names.
pub(crate) fn read(directory: &Path) -> Vec<Step> {
    let mut paths: Vec<_> = std::fs::read_dir(directory)
        .expect("the corpus is a directory")
        .map(|entry| entry.expect("the corpus can be listed").path())
        .collect();
    paths.sort();
    paths.iter().flat_map(|path| read_file(path)).collect()
}

fn read_file(path: &Path) -> Vec<Step> {
    let text = std::fs::read_to_string(path).expect("a file of the corpus is text");
    let name = path.file_stem().expect("a file has a name").to_string_lossy().into_owned();
    let mut file = File { name, ..File::default() };
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let mut block = Vec::new();
        while let Some(next) = lines.next_if(|next| next.starts_with("  ") || next.trim().is_empty()) {
            block.push(next.strip_prefix("  ").unwrap_or_default());
        }
        file.item(line, &block);
    }
    file.steps
}

impl File {
    fn item(&mut self, line: &str, block: &[&str]) {
        let line = self.fill(line);
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "let" => {
                let (name, text) = rest.split_once(' ').unwrap_or_else(|| panic!("{line}: no text"));
                self.texts.insert(name.to_owned(), text.to_owned());
            }
            "base" => {
                let value = yaml(&self.fill(&block.join("\n")), &line);
                self.bases.insert(rest.to_owned(), value);
            }
            _ => self.step(&line, block),
        }
    }

    fn fill(&self, text: &str) -> String {
        self.texts
            .iter()
            .fold(text.to_owned(), |text, (name, value)| text.replace(&format!("{{{name}}}"), value))
    }

    fn step(&mut self, line: &str, block: &[&str]) {
        let mut words = line.split(' ');
        let mut word = || words.next().unwrap_or_default().to_owned();
        let (method, path) = (word(), word());
        let id = format!("{} {} {method} {path}", self.name, self.steps.len() + 1);
        let mut step = Step {
            id,
            method,
            path,
            body: Text::None,
            body_format: None,
            wanted_format: None,
            take: None,
            setup: false,
            await_found: false,
            headers: Vec::new(),
            saves: Vec::new(),
            managed: false,
            differs: Vec::new(),
        };
        while let Some(option) = words.next() {
            let mut value = || words.next().unwrap_or_else(|| panic!("{line}: {option} what?")).to_owned();
            match option {
                "as" => step.body_format = Some(value()),
                "want" => step.wanted_format = Some(value()),
                "take" => step.take = Some(value().parse().expect("a number")),
                "setup" => step.setup = true,
                "await" => step.await_found = true,
                other => panic!("{line}: what is {other}?"),
            }
        }
        let mut body = String::new();
        for line in block {
            match line.strip_prefix("> ") {
                Some(directive) => step.directive(&self.fill(directive)),
                None => writeln!(body, "{}", self.fill(line)).expect("a string takes all"),
            }
        }
        step.body = self.body(body.trim_end(), line);
        self.steps.push(step);
    }

    fn body(&self, text: &str, line: &str) -> Text {
        if text.is_empty() {
            return Text::None;
        }
        if let Some(raw) = text.strip_prefix("raw ") {
            return Text::Raw(raw.to_owned());
        }
        if let Some(base) = self.bases.get(text) {
            return Text::Json(base.clone());
        }
        if let Some((name, change)) = text.split_once(" + ")
            && let Some(base) = self.bases.get(name)
        {
            let mut value = base.clone();
            json_patch::merge(&mut value, &yaml(change, line));
            return Text::Json(value);
        }
        Text::Json(yaml(text, line))
    }
}

impl Step {
    fn directive(&mut self, line: &str) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let pair = |separator| {
            let (first, second) = rest.split_once(separator).unwrap_or((rest, ""));
            (first.to_owned(), second.to_owned())
        };
        match word {
            "save" => self.saves.push(pair(" ")),
            "header" => self.headers.push(pair(": ")),
            "managed" => self.managed = true,
            "differs" => self.differs.push(pair(" ").0),
            other => panic!("{}: what is {other}?", self.id),
        }
    }
}

fn yaml(text: &str, line: &str) -> Value {
    // As YAML 1.2 has it, where `y` and `n` are texts.
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_str_with_options(text, options)
        .unwrap_or_else(|error| panic!("{line}: {error} in {text}"))
}
