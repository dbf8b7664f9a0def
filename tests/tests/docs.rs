//! Runs the documentation: the README and every page below `docs/` and `deploy/`.
//!
//! A fenced block of shell commands says in its first line what becomes of it:
//!
//! | mark | meaning |
//! |---|---|
//! | `sh run` | the block is executed and must succeed |
//! | `sh run fails` | the block is executed and its last command must fail |
//! | `sh not-run="reason"` | the block cannot be executed by this test |
//! | `text output` | what the block before it printed |
//! | `text output any-order` | the same, with the lines in any order |
//!
//! The blocks of a page run in order in one shell, in a checkout of the repository, on a machine of their own: mount,
//! network, process and host name namespaces, an empty `/var/lib` and `/run`, the host name `node-1`, `berth` and
//! `kubectl` in the path, and a `sudo` that runs its arguments. A page that begins with `<!-- machine: nfs -->` also has
//! an NFS server that exports `127.0.0.1:/export`; with `<!-- machine: user -->` the blocks are run by an ordinary user, who has
//! a home directory and no `sudo`; `<!-- programs: NAME -->` puts further programs of the workspace in the
//! path. A comment `<!-- wait: COMMAND -->` holds the next block back until the
//! command succeeds, where a reader has waited by reading.
//!
//! In an `output` block `…` stands for any text of a line, and on a line of its own for any lines. Durations, process
//! ids, UIDs and long hexadecimal numbers need not be equal, nor the width of white space.
//!
//! A block `rust file=PATH` must stand in that file, letter by letter.
//!
//! `BERTH_DOCS=write` writes the tables of flags instead of comparing them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs, mem,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};
use berth_e2e::{driver, machine, up::user::USER};

/// How many seconds the blocks of one page may take.
const PAGE_TIMEOUT: &str = "150";
const SHELLS: [&str; 5] = ["sh", "bash", "shell", "console", "zsh"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace").to_owned()
}

/// One page of the documentation.
struct Page {
    /// Its path in the repository.
    path: String,
    text: String,
    blocks: Vec<Block>,
}

/// A fenced block of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Block {
    /// The number of its first line of text, counted from 1.
    line: usize,
    /// What follows the fence.
    info: String,
    text: String,
    /// Commands that succeed once the block can run, from comments before it.
    waits: Vec<String>,
}

impl Block {
    fn language(&self) -> &str {
        self.info.split_whitespace().next().unwrap_or_default()
    }

    fn has(&self, mark: &str) -> bool {
        self.info.split_whitespace().skip(1).any(|word| word == mark)
    }

    fn is_shell(&self) -> bool {
        SHELLS.contains(&self.language())
    }

    fn is_run(&self) -> bool {
        self.is_shell() && self.has("run")
    }

    fn reason_not_to_run(&self) -> Option<&str> {
        self.info.split_once("not-run=\"")?.1.split_once('"').map(|(reason, _)| reason)
    }
}

impl Page {
    fn read(path: &str) -> Result<Self> {
        let text = fs::read_to_string(root().join(path)).with_context(|| format!("read {path}"))?;
        let blocks = blocks(&text).with_context(|| path.to_owned())?;
        Ok(Self { path: path.to_owned(), text, blocks })
    }

    /// What a comment of the form `<!-- key: value -->` says.
    fn setting(&self, key: &str) -> Option<&str> {
        comments(&self.text).find_map(|comment| comment.strip_prefix(key)?.strip_prefix(": "))
    }

    /// The code spans outside of fenced blocks, with the number of the line.
    fn spans(&self) -> Vec<(usize, String)> {
        let mut spans = Vec::new();
        let mut fenced = false;
        for (number, line) in self.text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
            } else if !fenced {
                let of_line = line.split('`').skip(1).step_by(2);
                spans.extend(of_line.map(|span| (number + 1, span.to_owned())));
            }
        }
        spans
    }
}

fn comments(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_prefix("<!-- ")?.strip_suffix(" -->"))
}

fn blocks(text: &str) -> Result<Vec<Block>> {
    let mut found = Vec::new();
    let mut open: Option<Block> = None;
    let mut waits = Vec::new();
    for (number, line) in text.lines().enumerate() {
        waits.extend(comments(line).filter_map(|comment| comment.strip_prefix("wait: ")).map(str::to_owned));
        match (open.take(), line.trim_start().strip_prefix("```")) {
            (Some(block), Some(_)) => found.push(block),
            (Some(mut block), None) => {
                block.text.push_str(line);
                block.text.push('\n');
                open = Some(block);
            }
            (None, Some(info)) => {
                let info = info.trim().to_owned();
                open =
                    Some(Block { line: number + 2, info, text: String::new(), waits: mem::take(&mut waits) });
            }
            (None, None) => {}
        }
    }
    ensure!(open.is_none(), "a fenced block is not closed");
    Ok(found)
}

fn markdown_below(dir: &str, found: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(root().join(dir)).with_context(|| format!("list {dir}"))? {
        let entry = entry?;
        let path = format!("{dir}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            markdown_below(&path, found)?;
        } else if entry.path().extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    Ok(())
}

fn pages() -> Result<Vec<Page>> {
    let mut paths = vec!["README.md".to_owned(), "CONTRIBUTING.md".to_owned()];
    markdown_below("docs", &mut paths)?;
    markdown_below("deploy", &mut paths)?;
    paths.sort();
    paths.iter().map(|path| Page::read(path)).collect()
}

fn is_chinese(page: &Page) -> bool {
    page.path.starts_with("docs/zh/")
}

#[test]
fn every_block_of_commands_says_whether_it_runs() -> Result<()> {
    let mut wrong = Vec::new();
    for page in pages()? {
        for block in &page.blocks {
            let at = format!("{}:{}", page.path, block.line);
            if block.info.is_empty() {
                wrong.push(format!("{at}: the block has no language"));
            } else if block.is_shell() && block.is_run() == block.reason_not_to_run().is_some() {
                wrong.push(format!("{at}: mark the block with run or with not-run=\"reason\""));
            } else if block.reason_not_to_run().is_some_and(|reason| reason.trim().is_empty()) {
                wrong.push(format!("{at}: say why the block is not run"));
            }
        }
        let mut fenced = false;
        let mut before = "";
        for (number, line) in page.text.lines().enumerate() {
            fenced ^= line.trim_start().starts_with("```");
            if !fenced && before.is_empty() && line.starts_with("    ") && !line.trim().is_empty() {
                wrong.push(format!("{}:{}: use a fenced block", page.path, number + 1));
            }
            before = line;
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

#[test]
fn code_that_a_page_quotes_stands_in_its_file() -> Result<()> {
    let mut wrong = Vec::new();
    for page in pages()? {
        for block in &page.blocks {
            let Some(path) = block.info.split_whitespace().find_map(|word| word.strip_prefix("file=")) else {
                continue;
            };
            let file = fs::read_to_string(root().join(path)).with_context(|| format!("read {path}"))?;
            if !file.contains(&block.text) {
                wrong.push(format!("{}:{}: {path} reads otherwise", page.path, block.line));
            }
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

#[test]
fn blocks_run_and_print_what_the_pages_say() -> Result<()> {
    let only = std::env::var("BERTH_DOCS_PAGE").ok();
    let mut wrong = Vec::new();
    for page in pages()?.iter().filter(|page| !is_chinese(page)) {
        let chosen = only.as_ref().is_none_or(|only| page.path.contains(only.as_str()));
        if chosen && page.blocks.iter().any(Block::is_run) {
            let begin = Instant::now();
            wrong.extend(run(page).with_context(|| format!("run {}", page.path))?);
            println!("{} took {:.1} s", page.path, begin.elapsed().as_secs_f64());
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    Ok(())
}

/// Runs a page; says what went otherwise than the page says.
fn run(page: &Page) -> Result<Vec<String>> {
    let dir = tempfile::Builder::new().prefix("docs-").tempdir()?;
    let programs = page.setting("programs").unwrap_or_default();
    prepare_machine(dir.path(), programs.split(", ").filter(|name| !name.is_empty()))?;
    let script = dir.path().join("script");
    fs::write(&script, machine_script(page))?;
    fs::write(dir.path().join("blocks"), blocks_script(page))?;
    let program =
        ["--kill-after=10", PAGE_TIMEOUT, "unshare", "--mount", "--net", "--pid", "--uts", "--fork"];
    let mut command = machine::command("timeout");
    command.args(program).args(["--kill-child", "--mount-proc", "bash"]).arg(&script).stdin(Stdio::null());
    command.env("PAGE", dir.path()).env("REPOSITORY", root()).env("TESTBED", root().join("testbed"));
    for name in ["KUBECONFIG", "BERTH_LOG", "BERTH_DATA_DIR", "POD_NAME", "POD_NAMESPACE", "NAMESPACE"] {
        command.env_remove(name);
    }
    let output = command.output().context("start the page's machine")?;
    let printed = |number: usize| fs::read(dir.path().join("out").join(number.to_string()));
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();

    let mut wrong = Vec::new();
    if !output.status.success() {
        let at = fs::read_to_string(dir.path().join("at")).unwrap_or_default();
        let number: Option<usize> = at.trim().parse().ok();
        let line = number.and_then(|number| page.blocks.get(number)).map_or(0, |block| block.line);
        let said = number.and_then(|number| printed(number).ok()).map(text).unwrap_or_default();
        let machine = String::from_utf8_lossy(&output.stderr);
        wrong.push(format!("{}:{line}: the block ended with {}:\n{said}{machine}", page.path, output.status));
    }
    let mut ran = None;
    for (number, block) in page.blocks.iter().enumerate() {
        if block.is_run() {
            ran = Some(number);
        } else if block.has("output") {
            let number = ran.with_context(|| format!("{}: nothing ran before the output", block.line))?;
            let Ok(said) = printed(number).map(text) else { continue };
            if !matches(&block.text, &said, block.has("any-order")) {
                wrong.push(format!("{}:{}: the block before printed:\n{said}", page.path, block.line));
            }
        }
    }
    let (mounts, loops) = (machine::mounts_below(dir.path())?, machine::loops_below(dir.path())?);
    if !mounts.is_empty() || !loops.is_empty() {
        wrong.push(format!("{}: left behind: {mounts:?} {loops:?}", page.path));
        machine::clear_below(dir.path())?;
    }
    Ok(wrong)
}

/// Makes what a page's machine has: programs, a home, a checkout, and room for `/var/lib`.
fn prepare_machine<'a>(dir: &Path, programs: impl Iterator<Item = &'a str>) -> Result<()> {
    for name in ["bin", "home", "out", "checkout", "var-lib/nfs", "export"] {
        fs::create_dir_all(dir.join(name))?;
    }
    let berth = driver::binary()?;
    for name in programs {
        install(&berth.with_file_name(name), &dir.join("bin").join(name))?;
    }
    install(&berth, &dir.join("bin/berth"))?;
    let sudo = dir.join("bin/sudo");
    fs::write(&sudo, "#!/bin/sh\nexec \"$@\"\n")?;
    fs::set_permissions(&sudo, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(root())? {
        let entry = entry?;
        std::os::unix::fs::symlink(entry.path(), dir.join("checkout").join(entry.file_name()))?;
    }
    Ok(())
}

/// Puts a program that was built into the path of a page's machine.
fn install(built: &Path, installed: &Path) -> Result<()> {
    if fs::hard_link(built, installed).is_err() {
        fs::copy(built, installed).with_context(|| format!("copy {}", built.display()))?;
    }
    Ok(())
}

/// The shell script that makes a page's machine, and then runs its blocks.
fn machine_script(page: &Page) -> String {
    let mut script = String::from(
        r#"set -euo pipefail
ip link set lo up
echo node-1 > /proc/sys/kernel/hostname
mount --bind "$PAGE/var-lib" /var/lib
mount -t tmpfs tmpfs /run
"#,
    );
    if page.setting("machine") == Some("user") {
        // What lies below the home of root is bound where the user finds it.
        let _ = write!(
            script,
            r#"rm "$PAGE/bin/sudo"
mount --bind "$REPOSITORY" "$PAGE/checkout"
mkdir "$PAGE/kubectl"
[ ! -d "$HOME/.cache/kube-testbed/bin" ] || mount --bind "$HOME/.cache/kube-testbed/bin" "$PAGE/kubectl"
chmod 755 "$PAGE"
touch "$PAGE/at"
chown -R {USER}:{USER} "$PAGE/home" "$PAGE/out" "$PAGE/at"
export PATH="$PAGE/bin:$PATH:$PAGE/kubectl" HOME="$PAGE/home" TMPDIR="$PAGE/home" USER=student
exec setpriv --reuid={USER} --regid={USER} --clear-groups --inh-caps=-all bash "$PAGE/blocks"
"#
        );
        return script;
    }
    script.push_str(
        r#"export PATH="$PAGE/bin:$PATH:/usr/sbin:/sbin:$HOME/.cache/kube-testbed/bin" HOME="$PAGE/home" USER=root
"#,
    );
    if page.setting("machine") == Some("nfs") {
        // The server ends with its input, which this shell holds open.
        script.push_str(
            r#"mkfifo "$PAGE/nfs"
"$TESTBED/nfs/ganesha.sh" "$PAGE/nfs-state" "$PAGE/export" 2049 20048 < "$PAGE/nfs" > "$PAGE/nfs-out" 2>&1 &
exec 9> "$PAGE/nfs"
until grep -q ready "$PAGE/nfs-out"; do kill -0 $!; sleep 0.05; done
"#,
        );
    }
    script.push_str("exec bash \"$PAGE/blocks\"\n");
    script
}

/// The blocks of a page as a shell script, each with its output in a file of its own.
fn blocks_script(page: &Page) -> String {
    let mut script = String::from(
        r#"set -euo pipefail
cd "$PAGE/checkout"
trap 'berth down --purge >/dev/null 2>&1 || true' EXIT
"#,
    );
    for (number, block) in page.blocks.iter().enumerate().filter(|(_, block)| block.is_run()) {
        let Block { text, .. } = block;
        let out = format!("> \"$PAGE/out/{number}\" 2>&1 9>&-");
        let _ = writeln!(script, "echo {number} > \"$PAGE/at\"");
        for wait in &block.waits {
            // No more than 30 seconds, after which the block shows what is wrong.
            let _ = writeln!(
                script,
                "for try in {{1..150}}; do if {wait}; then break; fi; sleep 0.2; done >/dev/null 2>&1"
            );
        }
        if block.has("fails") {
            let _ = writeln!(script, "set +e\n{{\n{text}}} {out}\nstatus=$?\nset -e\n[ $status != 0 ]");
        } else {
            let _ = writeln!(script, "{{\n{text}}} {out}");
        }
    }
    script
}

/// Whether a program printed what the page says that it prints.
fn matches(expected: &str, printed: &str, any_order: bool) -> bool {
    let lines = |text: &str| text.lines().map(fold).filter(|line| !line.is_empty()).collect::<Vec<_>>();
    let (expected, mut printed) = (lines(expected), lines(printed));
    if !any_order {
        return lines_match(&expected, &printed);
    }
    let open = expected.iter().any(|line| line == "…");
    for line in expected.iter().filter(|line| *line != "…") {
        let Some(at) = printed.iter().position(|other| line_matches(line, other)) else { return false };
        printed.remove(at);
    }
    open || printed.is_empty()
}

fn lines_match(expected: &[String], printed: &[String]) -> bool {
    match (expected.split_first(), printed.split_first()) {
        (None, None) => true,
        (Some((line, rest)), _) if line == "…" => {
            (0..=printed.len()).any(|skipped| lines_match(rest, &printed[skipped..]))
        }
        (Some((line, rest)), Some((other, others))) => line_matches(line, other) && lines_match(rest, others),
        _ => false,
    }
}

fn line_matches(expected: &str, printed: &str) -> bool {
    let Some((start, rest)) = expected.split_once('…') else { return expected == printed };
    let Some(printed) = printed.strip_prefix(start) else { return false };
    (0..=printed.len())
        .filter(|at| printed.is_char_boundary(*at))
        .any(|at| line_matches(rest, &printed[at..]))
}

/// A line without what differs each time: durations, process ids, UIDs, hashes, the width of white space.
fn fold(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let mut folded: Vec<String> = Vec::new();
    for (at, word) in words.iter().enumerate() {
        let before = at.checked_sub(1).map_or("", |before| words[before]);
        let unit = ["s", "ms", "µs", "min", "h"].contains(word);
        if unit && is_number(before) {
            folded.pop();
            folded.push("<time>".into());
        } else if is_duration(word) {
            folded.push("<time>".into());
        } else if before == "(process" {
            folded.push(word.trim_start_matches(|c: char| c.is_ascii_digit()).into());
        } else {
            folded.push(fold_ids(word));
        }
    }
    folded.join(" ")
}

fn is_number(word: &str) -> bool {
    let word = word.strip_prefix('-').unwrap_or(word);
    !word.is_empty() && word.chars().all(|c| c.is_ascii_digit() || c == '.')
}

/// Such as `5s`, `2m10s` or `1.5ms`.
fn is_duration(word: &str) -> bool {
    let word = word.trim_end_matches([',', ';', '.', ')']);
    let mut rest = word;
    while let Some(at) = rest.find(|c: char| !c.is_ascii_digit() && c != '.') {
        let unit = ["ms", "µs", "s", "m", "h", "d"].into_iter().find(|unit| rest[at..].starts_with(unit));
        match unit {
            Some(unit) if at > 0 => rest = &rest[at + unit.len()..],
            _ => return false,
        }
    }
    rest.is_empty() && !word.is_empty()
}

/// A word in which every UID and every long hexadecimal number is the same.
fn fold_ids(word: &str) -> String {
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    let is_uid = |groups: &[&str]| {
        groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
            && groups.iter().all(|group| is_hex(group))
    };
    let mut folded = String::new();
    for part in word.split_inclusive(|c: char| !c.is_ascii_alphanumeric() && c != '-') {
        let end = part.trim_end_matches(|c: char| !c.is_ascii_alphanumeric() && c != '-').len();
        let groups: Vec<&str> = part[..end].split('-').collect();
        let mut at = 0;
        while at < groups.len() {
            let rest = &groups[at..];
            let (taken, text) = match rest {
                _ if rest.len() >= 5 && is_uid(&rest[..5]) => (5, "<id>"),
                _ if rest[0].len() >= 16 && is_hex(rest[0]) => (1, "<id>"),
                _ => (1, rest[0]),
            };
            folded.push_str(if at > 0 { "-" } else { "" });
            folded.push_str(text);
            at += taken;
        }
        folded.push_str(&part[end..]);
    }
    folded
}

#[test]
fn only_what_differs_each_time_is_folded() {
    let table = [
        (
            "     0.357 s  CREATED     provisioner   CreateVolume     8.3 ms",
            "<time> CREATED provisioner CreateVolume <time>",
        ),
        ("pvc-ece784c0-cf26-4f23-a92d-0e5be49a57bb   1Gi", "pvc-<id> 1Gi"),
        ("pod/writer   1/1     Running   0          2m5s", "pod/writer 1/1 Running 0 <time>"),
        (
            "Berth runs in /var/lib/berth (process 917), started 3 s ago",
            "Berth runs in /var/lib/berth (process ), started <time> ago",
        ),
    ];
    for (line, folded) in table {
        assert_eq!(fold(line), folded);
    }
    assert!(matches("a …\n…\nlast", "a b\nc\nd\nlast\n", false));
    assert!(!matches("a …\nlast", "a b\nc\nlast\n", false));
    assert!(matches("one\ntwo", "two\none\n", true));
    assert!(!matches("one\ntwo", "two\none\nthree\n", true));
}

/// Pages are compared with the program, and not with its sources.
const BUILD_FIRST: &str = "run cargo build -p berth first";

/// The commands of the program, with their help and the hidden flags that were looked for.
#[derive(Default)]
struct Help {
    texts: BTreeMap<String, String>,
    hidden: BTreeMap<(String, String), bool>,
}

impl Help {
    /// The help of the program that was built last; fails if there is none.
    fn of_built_program() -> Result<Self> {
        let mut help = Self::default();
        help.of(&[]).context(BUILD_FIRST)?;
        Ok(help)
    }

    /// What `berth WORDS --help` prints.
    fn of(&mut self, words: &[&str]) -> Result<&str> {
        let key = words.join(" ");
        if !self.texts.contains_key(&key) {
            let output = machine::command(driver::binary()?).args(words).arg("--help").output()?;
            ensure!(
                output.status.success(),
                "berth {key} --help: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            self.texts.insert(key.clone(), String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Ok(&self.texts[&key])
    }

    fn subcommands(&mut self, words: &[&str]) -> Result<BTreeSet<String>> {
        let help = self.of(words)?;
        let mut found = BTreeSet::new();
        let mut listed = false;
        for line in help.lines() {
            // Options end the commands; other headings, such as those of groups of commands, do not.
            listed = (listed || line.ends_with("ommands:")) && !line.starts_with("Options:");
            let name = line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')).unwrap_or_default();
            if listed && name.contains(", ") && name.split(", ").all(|name| !name.contains(' ')) {
                // Names alone, several in a line.
                found.extend(name.trim_end_matches(',').split(", ").map(str::to_owned));
            } else if let Some(name) = name.split_whitespace().next().filter(|_| listed) {
                found.insert(name.to_owned());
            }
        }
        Ok(found)
    }

    fn shows(&mut self, words: &[&str], flag: &str) -> Result<bool> {
        Ok(flags(self.of(words)?).iter().any(|known| known.name == flag))
    }

    /// Whether a command takes a flag; those of upstream that have another name here are taken and not shown.
    fn takes(&mut self, words: &[&str], flag: &str) -> Result<bool> {
        if self.shows(words, flag)? {
            return Ok(true);
        }
        let key = (words.join(" "), flag.to_owned());
        if let Some(known) = self.hidden.get(&key) {
            return Ok(*known);
        }
        let mut command = machine::command(driver::binary()?);
        let output = command.args(words).arg(format!("{flag}=1")).arg("--help").output()?;
        let known = !String::from_utf8_lossy(&output.stderr).contains("unexpected argument");
        self.hidden.insert(key, known);
        Ok(known)
    }

    /// Splits `berth WORDS…` into the command and what follows it.
    fn command<'a>(&mut self, words: &[&'a str]) -> Result<(Vec<&'a str>, Vec<&'a str>)> {
        let mut command = Vec::new();
        loop {
            let known = self.subcommands(&command)?;
            let Some(word) = words.get(command.len()) else { break };
            if known.contains(*word) {
                command.push(*word);
            } else {
                let placeholder = word.chars().all(|c| c.is_ascii_uppercase() || c == '…');
                ensure!(known.is_empty() || placeholder || word.starts_with('-'), "there is no berth {word}");
                break;
            }
        }
        let rest = words[command.len()..].to_vec();
        Ok((command, rest))
    }
}

/// A flag as the help shows it.
struct Flag {
    /// The name with its dashes.
    name: String,
    value: String,
    /// What it does, and its default and choices in brackets.
    text: String,
}

fn flags(help: &str) -> Vec<Flag> {
    let mut found: Vec<Flag> = Vec::new();
    let mut indent = 0;
    for line in help.lines() {
        let depth = line.len() - line.trim_start().len();
        let words = line.trim_start();
        let words = if depth <= 6 && words.starts_with('-') && !words.starts_with("--") {
            words.split_once(", ").map_or("", |(_, long)| long)
        } else {
            words
        };
        if let Some(rest) = words.strip_prefix("--").filter(|_| depth <= 6) {
            let end = rest.find([' ', '[', '=']).unwrap_or(rest.len());
            let (value, text) = rest[end..].split_once("  ").unwrap_or((&rest[end..], ""));
            found.push(Flag {
                name: format!("--{}", &rest[..end]),
                value: value.trim().to_owned(),
                text: text.trim().to_owned(),
            });
            indent = depth;
        } else if let Some(flag) = found.last_mut() {
            if depth > indent.max(6) && !words.is_empty() {
                // A possible value has a line of its own.
                flag.text.push_str(if words.starts_with("- ") { " · " } else { " " });
                flag.text.push_str(words.trim_start_matches("- "));
            } else if !words.is_empty() {
                // A heading ends the last flag.
                indent = usize::MAX - 1;
            }
        }
    }
    found
}

/// The words of the commands in a block or a span that call berth, without the name of the program.
fn calls(text: &str) -> Vec<Vec<String>> {
    let joined = text.replace("\\\n", " ");
    let mut calls = Vec::new();
    for line in joined.lines() {
        let line = line.split(" #").next().unwrap_or_default();
        for part in line.split(['|', ';', '&', '(', ')', '<', '>']) {
            let mut words =
                part.split_whitespace().skip_while(|word| *word == "sudo" || word.contains('=')).peekable();
            if words.next_if(|word| *word == "berth").is_some() {
                calls.push(words.map(|word| word.trim_matches(['"', '\'']).to_owned()).collect());
            }
        }
    }
    calls
}

#[test]
fn every_command_and_flag_that_a_page_names_exists() -> Result<()> {
    let mut help = Help::of_built_program()?;
    let mut wrong = Vec::new();
    for page in pages()? {
        let mut named: BTreeSet<Vec<String>> = BTreeSet::new();
        let commands = page.setting("commands").unwrap_or_default().split(", ");
        let mut texts: Vec<(usize, String)> = commands.map(|command| (1, command.to_owned())).collect();
        texts.extend(
            page.blocks.iter().filter(|block| block.is_shell()).map(|block| (block.line, block.text.clone())),
        );
        texts.extend(page.spans());
        for (line, text) in &texts {
            for call in calls(text) {
                let words: Vec<&str> = call.iter().map(String::as_str).collect();
                match help.command(&words) {
                    Err(error) => wrong.push(format!("{}:{line}: {error}", page.path)),
                    Ok((command, rest)) => {
                        // Behind two dashes are the words of another program.
                        let own = rest.iter().take_while(|word| **word != "--");
                        for word in own.filter(|word| word.starts_with("--")) {
                            let flag = word.split(['=', '[']).next().unwrap_or_default();
                            if !help.takes(&command, flag)? {
                                wrong.push(format!(
                                    "{}:{line}: berth {} has no {flag}",
                                    page.path,
                                    command.join(" ")
                                ));
                            }
                        }
                        named.insert(command.iter().map(ToString::to_string).collect());
                    }
                }
            }
        }
        for (line, span) in page.spans() {
            let Some(flag) =
                span.split(['=', ' ', '[']).next().filter(|word| word.len() > 2 && word.starts_with("--"))
            else {
                continue;
            };
            let mut known = false;
            for probe in [Help::shows, Help::takes] {
                for command in &named {
                    let words: Vec<&str> = command.iter().map(String::as_str).collect();
                    known = known || probe(&mut help, &words, flag)?;
                }
            }
            if !known {
                wrong.push(format!("{}:{line}: no command that the page names has {flag}", page.path));
            }
        }
    }
    ensure!(wrong.is_empty(), "{BUILD_FIRST}, if that was before the last change; then: {wrong:#?}");
    Ok(())
}

#[test]
fn every_benchmark_is_in_its_page() -> Result<()> {
    let makefile = fs::read_to_string(root().join("Makefile"))?;
    let page = Page::read("docs/benchmarks.md")?;
    let targets = makefile.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name);
    for target in targets.filter(|name| name.starts_with("bench")) {
        ensure!(page.text.contains(&format!("| `make {target}` |")), "the page lacks make {target}");
    }
    Ok(())
}

#[test]
fn every_file_and_target_that_a_page_names_exists() -> Result<()> {
    let makefile = fs::read_to_string(root().join("Makefile"))?;
    let target = |name: &str| makefile.lines().any(|line| line.starts_with(&format!("{name}:")));
    let mut wrong = Vec::new();
    for page in pages()? {
        let dir = Path::new(&page.path).parent().unwrap_or(Path::new(""));
        for (number, line) in page.text.lines().enumerate() {
            for link in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                let path = link.split('#').next().unwrap_or_default();
                if !path.is_empty() && !path.contains("://") && !root().join(dir).join(path).exists() {
                    wrong.push(format!("{}:{}: there is no {link}", page.path, number + 1));
                }
            }
        }
        for (line, span) in page.spans() {
            let ours = ["crates/", "tests/", "deploy/", "examples/", "docs/", "testbed/"];
            let path = span.split([' ', ':', '{', '*', '#']).next().unwrap_or_default();
            if ours.iter().any(|start| path.starts_with(start)) && !root().join(path).exists() {
                wrong.push(format!("{}:{line}: there is no {path}", page.path));
            }
            let goal = span.strip_prefix("make ").and_then(|rest| rest.split(' ').next());
            if let Some(goal) = goal.filter(|goal| !target(goal)) {
                wrong.push(format!("{}:{line}: the Makefile has no {goal}", page.path));
            }
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// The table of a command's flags, in the order of their names, as a page has it.
fn table(help: &str) -> String {
    let mut rows = String::from("| flag | |\n|---|---|\n");
    let mut flags = flags(help);
    flags.retain(|flag| flag.name != "--help" && flag.name != "--version");
    flags.sort_by(|one, other| one.name.cmp(&other.name));
    for flag in &flags {
        let value = flag.value.trim_start_matches("[=").trim_end_matches(']').trim_matches(['<', '>']);
        let value = if value.is_empty() { String::new() } else { format!(" {value}") };
        let text = flag.text.trim().replace('|', "\\|");
        // Whether the variable is set here is no matter of the page.
        let text = text.replace("=]", "]");
        let _ = writeln!(rows, "| `{}{value}` | {text} |", flag.name);
    }
    rows
}

#[test]
fn tables_of_flags_are_those_of_the_program() -> Result<()> {
    let write = std::env::var("BERTH_DOCS").is_ok_and(|value| value == "write");
    let mut help = Help::of_built_program()?;
    for page in pages()? {
        let mut text = page.text.clone();
        for comment in comments(&page.text) {
            let Some(command) = comment.strip_prefix("flags: berth ") else { continue };
            let words: Vec<&str> = command.split(' ').collect();
            let start = format!("<!-- {comment} -->\n");
            let (before, rest) = text.split_once(&start).context("the comment is there")?;
            let Some((_, after)) = rest.split_once("<!-- end -->") else {
                bail!("{}: the table of berth {command} has no end", page.path);
            };
            text = format!("{before}{start}\n{}\n<!-- end -->{after}", table(help.of(&words)?));
        }
        if write && text != page.text {
            fs::write(root().join(&page.path), text)?;
        } else {
            let advice = "BERTH_DOCS=write cargo test -p berth-e2e --test docs tables_of_flags";
            ensure!(
                text == page.text,
                "{} does not have the flags of the program; {BUILD_FIRST}, then {advice}",
                page.path
            );
        }
    }
    Ok(())
}

/// A number that changes with the text: FNV-1a of 64 bits.
fn revision(text: &str) -> String {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{hash:016x}")
}

#[test]
fn chinese_pages_were_looked_at_since_the_english_ones_changed() -> Result<()> {
    let mut wrong = Vec::new();
    for page in pages()?.iter().filter(|page| is_chinese(page)) {
        let at = &page.path;
        let Some((path, looked_at)) =
            page.setting("english").and_then(|value| value.split_once(" revision "))
        else {
            wrong.push(format!("{at}: no <!-- english: PAGE revision NUMBER -->"));
            continue;
        };
        let english = Page::read(path)?;
        let now = revision(&english.text);
        if looked_at != now {
            wrong.push(format!("{at}: {path} has changed; translate the change, then write revision {now}"));
        }
        let code = |page: &Page| -> Vec<(String, String)> {
            page.blocks.iter().map(|block| (block.info.clone(), block.text.clone())).collect()
        };
        if code(page) != code(&english) {
            wrong.push(format!("{at}: the blocks differ from those of {path}"));
        }
    }
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}
