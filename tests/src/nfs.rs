//! A real NFS server, in user space, with a directory of its own.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::machine;

/// An NFS server; it ends when it is dropped.
#[derive(Debug)]
pub struct Server {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    dir: tempfile::TempDir,
    /// The mount options by which it is reached.
    pub options: String,
}

impl Server {
    /// Starts one on free ports, with settings as `testbed/nfs/ganesha.sh` takes them.
    pub fn start(settings: &[&str]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        let ports = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
        let [port, mount_port] = [ports[0].local_addr()?.port(), ports[1].local_addr()?.port()];
        drop(ports);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testbed/nfs/ganesha.sh");
        let mut process = machine::command(script)
            .args([dir.path().join("state"), dir.path().join("export")])
            .args([port.to_string(), mount_port.to_string()])
            .args(settings)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the NFS server")?;
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().context("its output is piped")?);
        let options = format!("port={port},mountport={mount_port}");
        let mut server = Self { process, input, output, dir, options };
        server.expect("ready")?;
        Ok(server)
    }

    /// Tells it to stop, cont, kill or start.
    pub fn tell(&mut self, command: &str) -> Result<()> {
        writeln!(self.input.as_mut().context("it is told things until it ends")?, "{command}")?;
        self.expect("ok")
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        ensure!(line.trim() == word, "the NFS server says {line:?}");
        Ok(())
    }

    /// What it serves.
    pub fn export(&self) -> PathBuf {
        self.dir.path().join("export")
    }

    /// A place beside what it serves.
    pub fn path(&self, name: &str) -> PathBuf {
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
