//! The NFS driver as people run it, against a real NFS server in user space: the controller as nobody, with no
//! capability at all, the node beside it.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use berth_e2e::{csi::Csi, driver::binary, machine};
use serde_json::Value;

const NOBODY: u32 = 65534;
const PATIENCE: Duration = Duration::from_secs(60);
/// What NFS cannot have: nothing is attached, staged, bound to a place, grown on a node, changed or taken in groups.
const CANNOT: [&str; 10] = [
    "ControllerPublishVolume",
    "ControllerUnpublishVolume",
    "volume lifecycle",
    "NodeStageVolume",
    "NodeUnstageVolume",
    "NodeExpandVolume",
    "volume attribute class",
    "ModifyVolume",
    "GroupController Service",
    "accessibility requirements",
];
/// What publishes a volume, which takes a kernel with NFS; the virtual machine's suite does it.
const MOUNTS: &str = "should work|should be idempotent|NodeGetVolumeStats|already mounted at a different target|should remove target path|should return health for a valid volume";

/// An NFS server, and everything beside it in one temporary directory.
struct Server {
    process: Child,
    input: Option<ChildStdin>,
    _output: BufReader<ChildStdout>,
    dir: tempfile::TempDir,
    options: String,
}

impl Server {
    fn start() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        let ports = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
        let [port, mount_port] = [ports[0].local_addr()?.port(), ports[1].local_addr()?.port()];
        drop(ports);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testbed/nfs/ganesha.sh");
        let mut process = machine::command(script)
            .args([dir.path().join("state"), dir.path().join("export")])
            .args([port.to_string(), mount_port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the NFS server")?;
        let input = process.stdin.take();
        let mut output = BufReader::new(process.stdout.take().context("its output is piped")?);
        let mut line = String::new();
        output.read_line(&mut line)?;
        ensure!(line.trim() == "ready", "the NFS server says {line:?}");
        let options = format!("port={port},mountport={mount_port}");
        Ok(Self { process, input, _output: output, dir, options })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The script ends with its input, and takes the server along.
        self.input = None;
        let _ = self.process.wait();
    }
}

/// A running driver; killed when dropped.
struct Driver {
    child: Child,
    log: PathBuf,
}

impl Driver {
    /// Starts a part of the driver, as somebody, and waits until it answers.
    async fn start(
        server: &Server,
        program: &Path,
        mode: &str,
        version: &str,
        as_nobody: bool,
    ) -> Result<Self> {
        let socket = server.path(mode).join("csi.sock");
        fs::create_dir_all(server.path(mode))?;
        let log = server.path(&format!("{mode}.log"));
        let mut command = if as_nobody {
            chown(server.path(mode), Some(NOBODY), Some(NOBODY))?;
            let mut command = machine::command("setpriv");
            command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]);
            command.args(["--inh-caps=-all", "--bounding-set=-all"]).arg(program);
            command
        } else {
            machine::command(program)
        };
        command.args(["driver", "nfs", "--nodeid=node-1", "--mode", mode]);
        command.arg(format!("--endpoint=unix://{}", socket.display()));
        command.arg(format!("--default-mount-options=vers={version},{}", server.options));
        command.arg("--state-dir").arg(server.path(&format!("{mode}/state")));
        let output = fs::File::create(&log)?;
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(output).spawn()?;
        let mut driver = Self { child, log };
        let deadline = Instant::now() + PATIENCE;
        while !matches!(Csi::connect(&format!("unix://{}", socket.display()))?.probe().await, Ok(true)) {
            let ended = driver.child.try_wait()?;
            ensure!(ended.is_none() && Instant::now() < deadline, "no answer:\n{}", driver.said());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(driver)
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn conforms(version: &str) -> Result<()> {
    let server = Server::start()?;
    // Where everybody may read it.
    let program = server.path("berth");
    fs::copy(binary()?, &program)?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    let controller = Driver::start(&server, &program, "controller", version, true).await?;
    let status = fs::read_to_string(format!("/proc/{}/status", controller.child.id()))?;
    for line in ["Uid:\t65534\t65534\t65534\t65534", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"]
    {
        ensure!(status.contains(line), "the controller is not nobody: {line:?} is not in\n{status}");
    }
    let node = Driver::start(&server, &program, "node", version, false).await?;
    let share =
        if version == "3" { server.path("export").display().to_string() } else { "/export".to_owned() };
    fs::write(server.path("parameters.yaml"), format!("server: 127.0.0.1\nshare: {share}\n"))?;
    let report = server.path("report.json");
    let sanity = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.tools/bin/csi-sanity");
    ensure!(sanity.is_file(), "there is no csi-sanity: build it first with `make deps`");
    let output = machine::command(sanity)
        .arg(format!("--csi.endpoint=unix://{}", server.path("node/csi.sock").display()))
        .arg(format!("--csi.controllerendpoint=unix://{}", server.path("controller/csi.sock").display()))
        .arg(format!("--csi.mountdir={}", server.path("mount").display()))
        .arg(format!("--csi.stagingdir={}", server.path("staging").display()))
        .arg(format!("--csi.testvolumeparameters={}", server.path("parameters.yaml").display()))
        .arg(format!("--ginkgo.json-report={}", report.display()))
        .args(["--csi.testvolumesize=1073741824", "--csi.testvolumeexpandsize=1610612736"])
        .args(["--ginkgo.no-color", "--ginkgo.timeout=10m", &format!("--ginkgo.skip={MOUNTS}")])
        .output()
        .context("start csi-sanity")?;
    let text = fs::read_to_string(&report)
        .with_context(|| format!("no report:\n{}", String::from_utf8_lossy(&output.stdout)))?;
    let (passed, failures, skipped) = outcome(&text)?;
    writeln!(std::io::stderr(), "csi-sanity, NFS {version}: {passed} passed, {} skipped", skipped.len())?;
    ensure!(failures.is_empty(), "{}\n{}\n{}", failures.join("\n"), controller.said(), node.said());
    let odd: Vec<_> = skipped.iter().filter(|name| !CANNOT.iter().any(|word| name.contains(word))).collect();
    ensure!(odd.is_empty(), "skipped, though NFS can have it: {odd:#?}");
    ensure!(passed > 55, "only {passed} specs passed");
    let left: Vec<_> = fs::read_dir(server.path("export"))?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .filter(|name| name != ".berth")
        .collect();
    ensure!(left.is_empty(), "left on the share: {left:?}");
    ensure!(!controller.said().contains("ERROR"), "{}", controller.said());
    Ok(())
}

/// How many specs passed, which failed, and which skipped themselves.
fn outcome(report: &str) -> Result<(usize, Vec<String>, Vec<String>)> {
    let suites: Value = serde_json::from_str(report).context("parse csi-sanity's report")?;
    let (mut passed, mut failures, mut skipped) = (0, Vec::new(), Vec::new());
    let specs = suites.as_array().into_iter().flatten().filter_map(|suite| suite["SpecReports"].as_array());
    for spec in specs.flatten().filter(|spec| spec["LeafNodeType"] == "It") {
        let path = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let name = path.chain(spec["LeafNodeText"].as_str()).collect::<Vec<_>>().join(" ");
        let message = spec["Failure"]["Message"].as_str();
        match (spec["State"].as_str().context("a spec has a state")?, message) {
            ("passed", _) => passed += 1,
            ("skipped", Some(_)) => skipped.push(name),
            // Not to be run here at all.
            ("skipped", None) | ("pending", _) => {}
            (_, message) => failures.push(format!("{name}: {}", message.unwrap_or_default())),
        }
    }
    Ok((passed, failures, skipped))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_conforms_as_nobody_by_version_3() -> Result<()> {
    conforms("3").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_conforms_as_nobody_by_version_4() -> Result<()> {
    conforms("4.2").await
}
