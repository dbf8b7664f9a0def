//! `berth dev`: what it says of drivers that break rules, faults by a seed, secrets, what a kill leaves, and the view in a terminal.

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use berth_csi::{CallLayer, Endpoint, Listener, Metrics};
use berth_e2e::{driver, machine, program::Program};
use berth_testkit::FakeDriver;
use serde_json::Value;

use crate::new::Generated;

const PATIENCE: Duration = Duration::from_secs(90);
const CANARY: &str = "canary-9b1c77d2e5";

fn texts(output: &Output) -> (String, String) {
    (
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// The events in lines of JSON.
fn events(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_that_a_driver_breaks_are_named_and_the_exit_status_says_so() -> Result<()> {
    let dir = tempfile::Builder::new().prefix("dv-").rand_bytes(5).tempdir()?;
    let socket = dir.path().join("fake.sock");
    // It answers every call with OK, and mounts nothing.
    let fake: Arc<FakeDriver> = FakeDriver::new("fake.example.com");
    let listener = Listener::bind(&Endpoint::Unix(socket.clone())).await?;
    let layer = CallLayer::new(Metrics::unregistered("fake"), None);
    tokio::spawn(berth_csi::serve(listener, fake.routes(), layer, std::future::pending::<()>()));
    let endpoint = format!("unix://{}", socket.display());
    let dev = |args: &[&str]| {
        let mut command = machine::command(driver::binary()?);
        command
            .args(["dev", "--once", "--timeout", "30s"])
            .args(args)
            .current_dir(dir.path())
            .env("TMPDIR", dir.path());
        let output = tokio::task::block_in_place(|| command.stdin(Stdio::null()).output())?;
        anyhow::Ok((output.status.code(), texts(&output)))
    };
    let (status, (said, complaint)) = dev(&["--endpoint", &endpoint])?;
    ensure!(status == Some(1), "{status:?} {said}{complaint}");
    for expected in
        ["Driver fake.example.com", "✗ call.published (MUST)", "nothing is mounted at target_path"]
    {
        ensure!(said.contains(expected), "{expected:?} is not in:\n{said}");
    }
    for (args, says) in [
        (&["--", "/no/such/driver"][..], "the driver could not be run"),
        (&["--", "false"], "the driver ended"),
        (&[], "name a driver"),
        (&["--endpoint", &endpoint, "--fault", "kill@NodeStage"], "cannot be killed"),
        (&["--endpoint", &endpoint, "--step=Jump"], "no call \"Jump\""),
        (&["--fault", "explode"], "no fault \"explode\""),
    ] {
        let (status, (said, complaint)) = dev(args)?;
        ensure!(status == Some(2) && complaint.contains(says), "{args:?}: {status:?} {said}{complaint}");
    }
    let left = machine::listing(dir.path())?;
    ensure!(left.iter().all(|path| !path.starts_with("berth-dev")), "left: {left:?}");
    Ok(())
}

#[test]
fn a_driver_survives_kills_and_lost_answers_and_a_seed_repeats_them() -> Result<()> {
    let made = Generated::new(&["--lang", "shell"])?;
    // For each method what was done to its calls, one after the other.
    let run = || -> Result<BTreeMap<String, Vec<String>>> {
        let faults = [
            "kill@CreateVolume:during",
            "kill@NodePublish:before",
            "drop-answer@DeleteVolume",
            "delay=5ms/50%",
            "reorder",
        ];
        let mut command = made.berth(&["dev", "--once", "--json", "--seed", "77"])?;
        for fault in faults {
            command.args(["--fault", fault]);
        }
        let output = command.output()?;
        let (said, complaint) = texts(&output);
        ensure!(output.status.success(), "{}: {said}{complaint}", output.status);
        let mut methods: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for call in events(&said).into_iter().filter(|event| event["event"] == "call") {
            let faults: Vec<_> =
                call["faults"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            methods
                .entry(call["method"].as_str().unwrap_or_default().to_owned())
                .or_default()
                .push(faults.join(" "));
        }
        Ok(methods)
    };
    let has = |run: &BTreeMap<String, Vec<String>>, method: &str, fault: &str| {
        run.iter()
            .any(|(name, calls)| name.ends_with(method) && calls.iter().any(|faults| faults.contains(fault)))
    };
    let first = run()?;
    ensure!(has(&first, "CreateVolume", "kill"), "{first:?}");
    ensure!(has(&first, "DeleteVolume", "drop-answer"), "{first:?}");
    let second = run()?;
    // How often a caller tries again depends on the time; what happens to each try does not.
    for (method, calls) in &first {
        let again = second.get(method).map(Vec::as_slice).unwrap_or_default();
        let both = calls.len().min(again.len());
        ensure!(both > 0 && calls[..both] == again[..both], "{method}: {calls:?}, then {again:?}");
    }
    Ok(())
}

#[test]
fn a_secret_that_a_driver_prints_is_found_and_not_shown() -> Result<()> {
    let made = Generated::new(&["--lang", "shell"])?;
    let class = fs::read_to_string(made.path("examples/class.yaml"))?;
    let secret = "parameters:\n  csi.storage.k8s.io/provisioner-secret-name: keys\n  csi.storage.k8s.io/provisioner-secret-namespace: default";
    fs::write(made.path("examples/class.yaml"), class.replace("parameters:", secret))?;
    let object = format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: keys}}\nstringData: {{password: {CANARY}}}\n"
    );
    fs::write(made.path("examples/secret.yaml"), object)?;
    // A driver that writes the password into its log all the time.
    let leaking = format!(
        "while :; do echo using {CANARY}; sleep 0.005; done & exec berth driver exec --program ./driver --state-dir $1/state"
    );
    let record = made.path("record.jsonl");
    let args = ["dev", "--once", "--record", "record.jsonl", "--", "sh", "-c", &leaking, "driver", "{dir}"];
    let output = made.berth(&args)?.output()?;
    let (said, complaint) = texts(&output);
    ensure!(output.status.code() == Some(1), "{}: {said}{complaint}", output.status);
    let recorded = fs::read_to_string(&record)?;
    for text in [&said, &complaint, &recorded] {
        ensure!(!text.contains(CANARY), "the secret is in {text}");
    }
    ensure!(said.contains("✗ secret.log (MUST)") && said.contains("using ***stripped***"), "{said}");
    let create =
        events(&recorded).into_iter().find(|event| event["method"] == "/csi.v1.Controller/CreateVolume");
    let create = create.context("CreateVolume is recorded")?;
    ensure!(create["request"]["secrets"] == "***stripped***", "{create}");
    Ok(())
}

#[test]
fn calls_are_stepped_through_and_answered_by_hand_on_the_standard_input() -> Result<()> {
    let made = Generated::new(&["--lang", "shell"])?;
    let mut child = made
        .berth(&["dev", "--once", "--step=CreateVolume,NodePublish"])?
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // The second CreateVolume is sent, NodePublishVolume too, and then whatever comes.
    child.stdin.take().context("standard input was asked for")?.write_all(b"n\nn\nc\n")?;
    let output = child.wait_with_output()?;
    let (said, complaint) = texts(&output);
    ensure!(output.status.success(), "{}: {said}{complaint}", output.status);
    for expected in ["waits: CreateVolume", "waits: NodePublishVolume", "nsenter --target ", "n (send it)"] {
        ensure!(said.contains(expected), "{expected:?} is not in:\n{said}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_leaves_nothing_after_down_nor_after_the_next_run() -> Result<()> {
    let made = Generated::new(&["--lang", "shell"])?;
    let top = made.path("..").canonicalize()?;
    let started = |log: &str| -> Result<Program> {
        let command = made.berth(&["dev"])?;
        let environment: Vec<(String, String)> = command
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_str()?.to_owned(), value?.to_str()?.to_owned())))
            .collect();
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        // `Program` has no working directory: a shell goes there.
        let line = format!("cd {} && exec {} dev", made.path("").display(), driver::binary()?.display());
        Program::start(Path::new("/bin/sh"), &["-c", &line], &environment, top.join(log))
    };
    let data_of = |program: &Program| -> Result<PathBuf> {
        let log = program.log();
        let line =
            log.lines().find_map(|line| line.split_once("Machine in ")).context("no data directory")?.1;
        Ok(PathBuf::from(line.split(';').next().unwrap_or_default()))
    };
    for by_next_run in [false, true] {
        let mut program = started("dev.log")?;
        program.says("The pod runs").await?;
        let data = data_of(&program)?;
        ensure!(!machine::mounts_below(&data)?.is_empty(), "the volume is mounted");
        program.kill()?;
        fs::remove_file(top.join("dev.log"))?;
        if by_next_run {
            let output = made.berth(&["dev", "--once"])?.output()?;
            let (said, complaint) = texts(&output);
            ensure!(
                output.status.success() && said.contains("which a run that was killed had left"),
                "{said}{complaint}"
            );
        } else {
            let data = data.display().to_string();
            let output = made.berth(&["down", "--purge", "--data-dir", &data])?.output()?;
            ensure!(output.status.success(), "{:?}", texts(&output));
        }
        ensure!(
            !data.exists() && machine::mounts_below(&top)?.is_empty(),
            "something is left in {}",
            data.display()
        );
        let line = format!("unix://{}", data.display());
        let left: Vec<_> = fs::read_dir("/proc")?
            .flatten()
            .filter(|entry| {
                fs::read(entry.path().join("environ"))
                    .is_ok_and(|text| String::from_utf8_lossy(&text).contains(&line))
            })
            .map(|entry| entry.path())
            .collect();
        ensure!(left.is_empty(), "processes are left: {left:?}");
    }
    Ok(())
}

/// A terminal of its own; it ends when this is dropped.
struct Terminal {
    socket: PathBuf,
}

impl Terminal {
    fn start(socket: PathBuf, command: &str) -> Result<Self> {
        let terminal = Self { socket };
        terminal.tmux(&["new-session", "-d", "-x", "150", "-y", "45", command])?;
        Ok(terminal)
    }

    fn tmux(&self, args: &[&str]) -> Result<String> {
        let socket = self.socket.display().to_string();
        machine::run("tmux", &[&["-S", &socket, "-f", "/dev/null"], args].concat())
    }

    fn press(&self, keys: &[&str]) -> Result<()> {
        self.tmux(&[&["send-keys"], keys].concat()).map(drop)
    }

    fn screen(&self) -> Result<String> {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits until the screen shows a text, and gives it.
    fn shows(&self, text: &str) -> Result<String> {
        self.until(text, |screen| screen.contains(text))
    }

    fn until(&self, what: &str, shown: impl Fn(&str) -> bool) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen()?;
            if shown(&screen) {
                return Ok(screen);
            }
            ensure!(Instant::now() < deadline, "the screen does not show {what:?}:\n{screen}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}

/// Deletes the pod, and lets its volume be taken away call by call.
fn step_through_deletion(terminal: &Terminal, data: &Path) -> Result<()> {
    terminal.press(&["s"])?;
    terminal.shows("stepping")?;
    let kubeconfig = data.join("apiserver/kubeconfig").display().to_string();
    let kubectl = berth_e2e::up::kubectl::program();
    let mut delete = machine::command(kubectl);
    let deleted =
        delete.args(["--kubeconfig", &kubeconfig, "delete", "pod", "--all", "--wait=false"]).output()?;
    ensure!(deleted.status.success(), "{:?}", texts(&deleted));
    terminal.shows("waits: NodeUnpublishVolume")?;
    terminal.shows("nsenter --target ")?;
    terminal.press(&["n"])?;
    terminal.until("the call is gone", |screen| !screen.contains("waits: NodeUnpublishVolume"))?;
    terminal.press(&["c"])?;
    terminal.until("no stepping", |screen| !screen.contains("stepping"))?;
    Ok(())
}

#[test]
fn the_view_shows_calls_and_keys_restart_kill_break_and_step() -> Result<()> {
    let made = Generated::new(&["--lang", "shell"])?;
    let top = made.path("..").canonicalize()?;
    // A build that can fail.
    let text = fs::read_to_string(made.path("berth.toml"))?;
    fs::write(made.path("berth.toml"), text.replace("build = \"\"", "build = \"sh -n ./driver\""))?;
    let berth = driver::binary()?;
    let line = format!(
        "cd {} && env -u BERTH_LOG TMPDIR={} {} dev --seed 3; echo ended with $?; sleep 1000",
        made.path("").display(),
        top.display(),
        berth.display()
    );
    let terminal = Terminal::start(top.join("tmux.sock"), &line)?;
    let screen = terminal.shows("The pod runs, with its volume mounted")?;
    for expected in
        ["CreateVolume", "NodePublishVolume", "never called", "+ mount node/pods", "no rule broken", "q quit"]
    {
        ensure!(screen.contains(expected), "{expected:?} is not in:\n{screen}");
    }
    let data = screen
        .lines()
        .find_map(|line| line.split_once("KUBECONFIG="))
        .context("no kubeconfig")?
        .1
        .trim()
        .to_owned();
    let data = Path::new(&data).ancestors().nth(2).context("a data directory")?.to_owned();

    // One call in full: the newest rows are notes, so go up to a call.
    terminal.press(&["Up"])?;
    terminal.press(&["Enter"])?;
    terminal.shows("Request")?;
    terminal.shows("\"target_path\":")?;
    terminal.press(&["Escape"])?;
    terminal.press(&["End"])?;

    terminal.press(&["k"])?;
    terminal.shows("The driver is killed by hand")?;
    let runs_again =
        |times: usize| move |screen: &str| screen.matches("The driver runs again").count() >= times;
    terminal.until("runs again", runs_again(1))?;
    terminal.press(&["r"])?;
    terminal.until("runs again twice", runs_again(2))?;
    terminal.press(&["2"])?;
    terminal.shows("faults: repeat=2")?;
    terminal.press(&["2"])?;
    terminal.shows("Calls are sent once")?;
    terminal.press(&["f"])?;
    terminal.press(&["-l", "explode"])?;
    terminal.press(&["Enter"])?;
    terminal.shows("there is no fault \"explode\"")?;
    terminal.press(&["f"])?;
    terminal.press(&["-l", "delay=10ms"])?;
    terminal.press(&["Enter"])?;
    terminal.shows("faults: delay=10ms")?;

    // Sources: a build that fails leaves the driver running, and mounts stay.
    let source = fs::read_to_string(made.path("driver"))?;
    fs::write(made.path("driver"), format!("{source}\nif\n"))?;
    terminal.shows("The build failed; the driver that runs stays.")?;
    fs::write(made.path("driver"), format!("{source}\n# saved\n"))?;
    terminal.until("runs again after the build", runs_again(3))?;
    let mounts = machine::mounts_below(&data.join("node/pods"))?;
    let is_volume = |path: &PathBuf| path.to_string_lossy().contains("kubernetes.io~csi");
    ensure!(
        mounts.iter().filter(|path| is_volume(path)).count() == 1,
        "the volume stays mounted: {mounts:?}"
    );

    step_through_deletion(&terminal, &data)?;

    terminal.press(&["q"])?;
    let screen = terminal.shows("ended with")?;
    ensure!(screen.contains("ended with 0"), "{screen}");
    ensure!(!data.exists() && machine::mounts_below(&top)?.is_empty(), "something is left");
    Ok(())
}
