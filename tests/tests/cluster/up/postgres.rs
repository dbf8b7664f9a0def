//! PostgreSQL, Debian's package, in a pod on a volume of Berth's, while everything around it is killed, grown and copied.
//!
//! Writers insert numbered rows, one after the other, and remember which of them the server has acknowledged. In the end
//! every one of these is in the table. `make test-postgres` runs more rounds.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use berth_e2e::{machine, nfs, up::Machine};

use super::{text, until_empty};

/// How often everything happens.
const ROUNDS: &str = "BERTH_POSTGRES_ROUNDS";
const WRITERS: u64 = 3;
/// After how many kills of its container a pod is replaced: the pause before each restart is twice as long as the last.
const RESTARTS: u64 = 2;

/// Where the server's programs are.
fn programs() -> Result<PathBuf> {
    let versions =
        fs::read_dir("/usr/lib/postgresql").context("PostgreSQL is not installed: run `make deps`")?;
    let newest = versions.flatten().map(|entry| entry.path()).max();
    Ok(newest.context("PostgreSQL is not installed: run `make deps`")?.join("bin"))
}

/// The server in a pod, with its data on a claim.
struct Server {
    name: &'static str,
    claim: &'static str,
    port: u16,
}

impl Server {
    fn manifest(&self) -> Result<String> {
        let (bin, user) = (programs()?, machine::run("id", &["-u", "postgres"])?);
        let Self { name, claim, port } = self;
        Ok(format!(
            r#"apiVersion: v1
kind: Pod
metadata: {{name: {name}}}
spec:
  terminationGracePeriodSeconds: 10
  securityContext: {{runAsUser: {user}, runAsGroup: {user}, fsGroup: {user}, fsGroupChangePolicy: OnRootMismatch}}
  containers:
  - name: postgres
    image: postgres
    command:
    - sh
    - -ec
    - |
      export PATH={bin}:$PATH LC_ALL=C.UTF-8
      if ! test -e /data/db; then
        rm -rf /data/new
        initdb -D /data/new -U postgres -A trust -E UTF8 --no-instructions
        sync /data/new
        mv /data/new /data/db
      fi
      exec postgres -D /data/db -p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c shared_buffers=16MB -c max_wal_size=64MB -c min_wal_size=32MB
    startupProbe: {{tcpSocket: {{host: 127.0.0.1, port: {port}}}, periodSeconds: 1, failureThreshold: 60}}
    readinessProbe: {{exec: {{command: [{bin}/pg_isready, -h, 127.0.0.1, -p, "{port}"]}}, periodSeconds: 1}}
    livenessProbe: {{exec: {{command: [{bin}/pg_isready, -h, 127.0.0.1, -p, "{port}", -t, "5"]}}, periodSeconds: 2, timeoutSeconds: 10, failureThreshold: 15}}
    volumeMounts: [{{name: data, mountPath: /data}}]
  volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]
"#,
            bin = bin.display(),
            user = user.trim(),
        ))
    }

    /// What the server answers to a statement.
    fn ask(&self, statement: &str) -> Result<String> {
        let psql = programs()?.join("psql").display().to_string();
        let answer = machine::run(
            &psql,
            &[&format!("postgres://postgres@127.0.0.1:{}/postgres", self.port), "-qtAX", "-c", statement],
        );
        answer.map(|answer| answer.trim().to_owned())
    }
}

/// A connection over which rows are inserted one by one.
struct Session {
    psql: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Session {
    fn open(port: u16) -> Result<Self> {
        let address = format!("postgres://postgres@127.0.0.1:{port}/postgres?connect_timeout=5");
        let mut command = machine::command(programs()?.join("psql"));
        command.args([&address, "-qtAX", "-v", "ON_ERROR_STOP=1"]);
        let mut psql = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let input = psql.stdin.take().context("input was asked for")?;
        let output = BufReader::new(psql.stdout.take().context("output was asked for")?);
        Ok(Self { psql, input, output })
    }

    /// Inserts a row; `true` when the server said that it is committed.
    fn insert(&mut self, writer: u64, number: u64) -> Result<bool> {
        // It prints the number when the answer is complete, which the server sends after the commit.
        writeln!(
            self.input,
            "insert into rows values ({writer}, {number}) on conflict do nothing; select {number};"
        )?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim() == number.to_string())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.psql.kill();
        let _ = self.psql.wait();
    }
}

/// Inserts rows until it is told to stop. Every number up to `acknowledged` was acknowledged.
struct Writer {
    acknowledged: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    fn start(port: u16, writer: u64) -> Self {
        let (acknowledged, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (known, told) = (acknowledged.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                let Ok(mut session) = Session::open(port) else { continue };
                while !told.load(Ordering::Relaxed) {
                    let number = known.load(Ordering::Relaxed) + 1;
                    if !session.insert(writer, number).unwrap_or(false) {
                        // The server is gone; that a row may be there though nobody said so is no loss.
                        std::thread::sleep(Duration::from_millis(20));
                        break;
                    }
                    known.store(number, Ordering::Relaxed);
                }
            }
        });
        Self { acknowledged, stop, thread: Some(thread) }
    }

    fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits until every writer got some more rows acknowledged.
fn progress(machine: &Machine, writers: &[Writer], what: &str) -> Result<()> {
    let before: Vec<u64> = writers.iter().map(Writer::acknowledged).collect();
    machine.until(&format!("rows are written {what}"), || {
        let more = writers.iter().zip(&before).all(|(writer, before)| writer.acknowledged() >= before + 20);
        Ok(more.then_some(()))
    })
}

/// Checks that a server has every row that was acknowledged by then.
fn complete(server: &Server, acknowledged: &[u64]) -> Result<()> {
    for (writer, last) in acknowledged.iter().enumerate() {
        let found =
            server.ask(&format!("select count(*) from rows where writer = {writer} and number <= {last}"))?;
        ensure!(found == last.to_string(), "writer {writer} was promised {last} rows, and {found} are there");
    }
    Ok(())
}

fn claim(name: &str, source: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  storageClassName: xfs\n  \
         accessModes: [ReadWriteOnce]\n{source}  resources: {{requests: {{storage: 1Gi}}}}\n"
    )
}

#[test]
fn no_committed_row_is_lost_whatever_happens_around_the_server() -> Result<()> {
    let rounds: u64 = std::env::var(ROUNDS).map_or(Ok(1), |rounds| rounds.parse())?;
    let mut machine = Machine::start()?;
    let class = "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: xfs}\nprovisioner: local.berth.dev\n\
                 allowVolumeExpansion: true\nparameters: {kind: image, csi.storage.k8s.io/fstype: xfs}\n";
    let server = Server { name: "server", claim: "data", port: nfs::free_port()? };
    machine.apply(&[class.to_owned(), claim("data", ""), server.manifest()?].join("---\n"))?;
    machine.ready("server")?;
    server.ask("create table rows (writer int, number int, primary key (writer, number))")?;
    let writers: Vec<Writer> = (0..WRITERS).map(|writer| Writer::start(server.port, writer)).collect();
    progress(&machine, &writers, "at first")?;
    let mut restarts = 0;
    for round in 1..=rounds {
        if restarts == RESTARTS {
            machine.delete("pod/server")?;
            machine.apply(&server.manifest()?)?;
            machine.ready("server")?;
            restarts = 0;
            progress(&machine, &writers, "after the pod was replaced")?;
        }
        restarts += 1;
        machine.exec_last("server", "kill -9 $(head -n 1 /data/db/postmaster.pid)")?;
        let restarted = format!("jsonpath={{.status.containerStatuses[0].restartCount}}={restarts}");
        machine.wait("pod/server", &restarted)?;
        progress(&machine, &writers, "after the container was killed")?;

        // Never whole Gi in this many rounds, which the API would say otherwise.
        let size = format!("{}Mi", 1024 + 96 * round);
        let patch = format!(r#"{{"spec":{{"resources":{{"requests":{{"storage":"{size}"}}}}}}}}"#);
        machine.kubectl(&["patch", "pvc/data", "-p", &patch])?;
        machine.wait("pvc/data", &format!("jsonpath={{.status.capacity.storage}}={size}"))?;
        progress(&machine, &writers, "after the volume has grown")?;

        machine.kill()?;
        progress(&machine, &writers, "while nothing but the pod runs")?;
        machine.restart()?;
        machine.ready("server")?;
        progress(&machine, &writers, "after berth up was killed and restarted")?;
        snapshot(&machine, &writers)?;
    }
    let acknowledged: Vec<u64> = writers.iter().map(Writer::acknowledged).collect();
    drop(writers);
    complete(&server, &acknowledged)?;
    machine.delete("pod/server")?;
    machine.apply(&server.manifest()?)?;
    machine.ready("server")?;
    complete(&server, &acknowledged).context("after the pod was replaced")?;
    let restarts = machine.get("pod/server")?;
    ensure!(
        restarts.pointer("/status/containerStatuses/0/restartCount").is_some_and(|count| count == 0),
        "{restarts}"
    );
    eprintln!("rows acknowledged and found: {acknowledged:?}, {rounds} rounds");
    machine.delete("pod/server pvc/data")?;
    until_empty(&machine)?;
    machine.finish()
}

/// Takes a snapshot under load, and starts a second server on a volume of it, which has all rows that were acknowledged before.
fn snapshot(machine: &Machine, writers: &[Writer]) -> Result<()> {
    let before: Vec<u64> = writers.iter().map(Writer::acknowledged).collect();
    machine.apply(
        "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {name: copy}\nspec:\n  \
         source: {persistentVolumeClaimName: data}\n",
    )?;
    machine.wait("volumesnapshot/copy", "jsonpath={.status.readyToUse}=true")?;
    let source = "  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: copy}\n";
    let size = machine.get("pvc/data")?;
    let restored = claim("restored", source).replace("1Gi", text(&size, "/status/capacity/storage"));
    let copy = Server { name: "copy", claim: "restored", port: nfs::free_port()? };
    machine.apply(&[restored, copy.manifest()?].join("---\n"))?;
    machine.ready("copy")?;
    complete(&copy, &before).context("in the snapshot")?;
    machine.delete("pod/copy pvc/restored volumesnapshot/copy")
}
