//! `berth new`: each template is generated, built where it has to be, passes csi-sanity in what it announces, does well in `berth dev --once`, and is
//! certified without a failure.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{driver, machine, program::Program, sanity};

const NAME: &str = "mydriver";

/// A generated driver in a directory of its own.
pub(crate) struct Generated {
    dir: tempfile::TempDir,
}

impl Generated {
    pub(crate) fn new(args: &[&str]) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("nw-").rand_bytes(5).tempdir()?;
        let mut command = machine::command(driver::binary()?);
        let output = command.arg("new").arg(NAME).args(args).current_dir(dir.path()).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "berth new {args:?}: {said}");
        let made = Self { dir };
        // What is written is what was promised, and nothing else lies beside it.
        ensure!(machine::listing(made.dir.path())?.iter().all(|path| path.starts_with(NAME)));
        for manifest in fs::read_dir(made.path("examples"))?.chain(fs::read_dir(made.path("deploy"))?) {
            let path = manifest?.path();
            let text = fs::read_to_string(&path)?;
            for document in text.split("\n---\n") {
                let read: serde_json::Value = serde_saphyr::from_str(document)
                    .with_context(|| format!("{} is no YAML:\n{text}", path.display()))?;
                ensure!(read["kind"].is_string(), "{}", path.display());
            }
        }
        Ok(made)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(NAME).join(name)
    }

    /// Runs a program in the driver's directory to its end.
    fn build(&self, program: &str, args: &[&str], environment: &[(&str, &str)]) -> Result<()> {
        let mut command = machine::command(program);
        command.args(args).envs(environment.iter().copied()).current_dir(self.dir.path().join(NAME));
        let output = command.output().with_context(|| format!("run {program}"))?;
        ensure!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// A command of berth in the driver's directory, with berth in the path and a directory for temporary files of its own.
    pub(crate) fn berth(&self, args: &[&str]) -> Result<Command> {
        let binary = driver::binary()?;
        let programs = binary.parent().context("a directory")?.display().to_string();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = machine::command(&binary);
        command.args(args).current_dir(self.dir.path().join(NAME)).stdin(Stdio::null());
        command.env("PATH", format!("{programs}:{path}")).env("TMPDIR", self.dir.path());
        command.env_remove("BERTH_LOG").env("CARGO_NET_OFFLINE", "true");
        Ok(command)
    }

    /// The words of `run` in `berth.toml`.
    fn run_words(&self) -> Result<Vec<String>> {
        let text = fs::read_to_string(self.path("berth.toml"))?;
        let run = text.lines().find_map(|line| line.strip_prefix("run = \"")?.strip_suffix('"'));
        Ok(run.context("berth.toml has no run")?.split(' ').map(str::to_owned).collect())
    }

    /// Develops the driver once and certifies it, both as its README says, but for a check that it cannot pass.
    fn does_well(&self, skip: Option<&str>) -> Result<()> {
        let begun = Instant::now();
        let output = self.berth(&["dev", "--once"])?.output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let all = format!("{said}{}", String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "berth dev --once: {}\n{all}", output.status);
        for expected in
            ["never called", "CreateVolume", "NodePublishVolume", "+ mount ", "No rule was broken"]
        {
            ensure!(said.contains(expected), "{expected:?} is not in:\n{said}");
        }
        let developed = begun.elapsed();
        let words = self.run_words()?;
        let mut args = vec!["certify", "--quiet", "--size", "64Mi"];
        let parameters = self.class_parameters()?;
        args.extend(parameters.iter().flat_map(|pair| ["--parameter", pair.as_str()]));
        args.extend(skip.iter().flat_map(|id| ["--skip", id]));
        args.push("--");
        args.extend(words.iter().map(String::as_str));
        let output = self.berth(&args)?.output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let all = format!("{said}{}", String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "berth certify: {}\n{all}", output.status);
        let summary = said.lines().last().unwrap_or_default();
        writeln!(
            std::io::stderr(),
            "berth dev {developed:?}, certify {:?}: {summary}",
            begun.elapsed().saturating_sub(developed)
        )?;
        let left = machine::listing(self.dir.path())?;
        ensure!(left.iter().all(|path| !path.starts_with("berth-")), "left: {left:?}");
        Ok(())
    }

    /// The class parameters in `berth.toml`, as KEY=VALUE.
    fn class_parameters(&self) -> Result<Vec<String>> {
        let text = fs::read_to_string(self.path("berth.toml"))?;
        let class = text.split_once("[class]").map_or("", |(_, class)| class);
        let pair = |line: &str| {
            let (key, value) = line.split_once(" = ")?;
            Some(format!("{key}={}", value.trim_matches('"')))
        };
        Ok(class.lines().filter_map(pair).collect())
    }

    /// Serves the driver by a program, and runs csi-sanity.
    async fn conforms(&self, program: &Path, args: &[&str], parameters: &str, least: usize) -> Result<()> {
        let text = |name: &str| self.dir.path().join(name).display().to_string();
        let endpoint = format!("unix://{}", text("csi.sock"));
        let (root, state) = (text("root"), text("state"));
        let environment =
            [("ROOT", &*root), ("STATE_DIR", &*state), ("CSI_ENDPOINT", &*endpoint), ("NODE_ID", "node-1")];
        let running = Program::start(program, args, &environment, self.dir.path().join("driver.log"))?;
        fs::write(text("parameters.yaml"), parameters)?;
        let arguments = [
            format!("--csi.endpoint={endpoint}"),
            format!("--csi.mountdir={}", text("mount")),
            format!("--csi.stagingdir={}", text("staging")),
            format!("--csi.testvolumeparameters={}", text("parameters.yaml")),
            "--csi.testvolumesize=67108864".to_owned(),
            "--csi.testvolumeexpandsize=134217728".to_owned(),
        ];
        let outcome = sanity::run(self.dir.path(), &arguments)?;
        writeln!(std::io::stderr(), "csi-sanity, berth new, {}: {outcome}", program.display())?;
        ensure!(outcome.failures.is_empty(), "{}\n{}", outcome.failures.join("\n"), running.log());
        ensure!(outcome.count("passed") >= least, "{outcome}");
        running.stop().await?;
        let mounts = machine::mounts_below(self.dir.path())?;
        ensure!(mounts.is_empty(), "mounted: {mounts:?}");
        Ok(())
    }
}

impl Drop for Generated {
    fn drop(&mut self) {
        let _ = machine::clear_below(self.dir.path());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shell_driver_is_clean_and_conforms() -> Result<()> {
    let made = Generated::new(&["--lang", "shell"])?;
    made.build("shellcheck", &["driver"], &[])?;
    let (program, state) =
        (made.path("driver").display().to_string(), made.path("state").display().to_string());
    let args = ["driver", "exec", "--program", &program, "--state-dir", &state];
    made.conforms(&driver::binary()?, &args, "mode: \"0770\"", 35).await?;
    made.does_well(None)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_driver_conforms() -> Result<()> {
    let made = Generated::new(&["--lang", "python"])?;
    let (program, state) =
        (made.path("driver").display().to_string(), made.path("state").display().to_string());
    let args = ["driver", "exec", "--stays", "--program", &program, "--state-dir", &state];
    made.conforms(&driver::binary()?, &args, "mode: \"0770\"", 35).await?;
    made.does_well(None)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_go_driver_builds_and_conforms() -> Result<()> {
    let made = Generated::new(&["--lang", "go"])?;
    made.build("go", &["vet", "."], &[])?;
    made.build("go", &["build", "-o", "driver", "."], &[])?;
    made.conforms(&made.path("driver"), &[], "", 25).await?;
    made.does_well(None)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rust_driver_builds_from_the_sources_in_the_binary_and_conforms() -> Result<()> {
    let made = Generated::new(&[])?;
    // A directory that stays, so that only what has changed is built again.
    let target = driver::binary()?.parent().context("a directory")?.join("new").display().to_string();
    made.build("cargo", &["build", "--offline", "--quiet"], &[("CARGO_TARGET_DIR", &target)])?;
    let built = Path::new(&target).join("debug/driver");
    made.conforms(&built, &[], "mode: \"0770\"", 35).await?;
    std::os::unix::fs::symlink(&target, made.path("target"))?;
    made.does_well(None)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_flexvolume_drivers_are_clean_and_conform_behind_the_adapter() -> Result<()> {
    for lang in ["shell", "python"] {
        let made = Generated::new(&["--kind", "flex", "--lang", lang])?;
        let plugin = format!("example.com~{NAME}/{NAME}");
        if lang == "shell" {
            made.build("shellcheck", &[&plugin], &[])?;
        }
        let (plugin, state) =
            (made.path(&plugin).display().to_string(), made.path("state").display().to_string());
        let args = ["driver", "flex", "--plugin", &plugin, "--state-dir", &state];
        made.conforms(&driver::binary()?, &args, "directory: \"${volume.id}\"", 20).await?;
        // FlexVolume has no call that says whether a volume exists: the driver makes what it is to mount.
        made.does_well(Some("errors.publish.missing"))?;
    }
    Ok(())
}

#[test]
fn bad_input_is_one_sentence_and_writes_nothing() -> Result<()> {
    let dir = tempfile::tempdir()?;
    fs::create_dir(dir.path().join("full"))?;
    fs::write(dir.path().join("full/file"), "mine")?;
    let before = machine::listing(dir.path())?;
    for (args, says) in [
        (&["Bad_Name"][..], "\"Bad_Name\" cannot be a driver's name"),
        (&["full"], "the directory full exists and is not empty"),
        (&["fine", "--kind", "flex", "--lang", "rust"], "use --lang shell or --lang python"),
        (&["fine", "--lang", "cobol"], "invalid value 'cobol'"),
    ] {
        let output =
            machine::command(driver::binary()?).arg("new").args(args).current_dir(dir.path()).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(2) && said.contains(says), "{args:?}: {} {said}", output.status);
    }
    ensure!(machine::listing(dir.path())? == before);
    Ok(())
}
