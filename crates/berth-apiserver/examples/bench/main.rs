//! Measures the API server, and beside it kube-apiserver with etcd if they are installed: `bench [KUBE_BINARIES]`.
//!
//! Both are asked over TLS by the same raw HTTP/1.1 client on kept connections, in the same minutes on the same disk,
//! and both answer a write only when it is on the disk. `BERTH_OBJECTS` says how many claims and volumes fill the store
//! for the restart.

#[path = "../../tests/server/http.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod http;
mod load;
mod servers;
mod table;

use std::path::{Path, PathBuf};

use self::servers::{Berth, Kube};
use self::table::{Figures, Table};

#[global_allocator]
static ALLOCATOR: berth_host::allocator::Allocator = berth_host::allocator::Allocator;

/// Whatever fails ends the measurement.
pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn setting(name: &str, default: usize) -> Outcome<usize> {
    std::env::var(name).map_or(Ok(default), |value| Ok(value.parse()?))
}

#[tokio::main]
async fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, directory, port] = &arguments[..]
        && mode == "serve"
    {
        return servers::serve(Path::new(directory), port.parse()?).await;
    }
    let berth = measure_berth().await?;
    let many = measure_many(setting("BERTH_OBJECTS", 100_000)?).await?;
    let mut table = Table { berth, many, kube: None };
    if let Some(binaries) = kube_binaries(arguments.first()) {
        table.kube = Some(measure_kube(&binaries).await?);
    }
    table.print();
    Ok(())
}

/// Where kube-apiserver and etcd are, if they are.
fn kube_binaries(given: Option<&String>) -> Option<PathBuf> {
    let usual = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/kube-testbed/bin"));
    let directory = given.map(PathBuf::from).or_else(usual)?;
    ["kube-apiserver", "etcd"].iter().all(|name| directory.join(name).exists()).then_some(directory)
}

async fn measure_berth() -> Outcome<Figures> {
    let directory = tempfile::tempdir()?;
    let server = Berth::start(directory.path()).await?;
    let first = server.ready;
    let mut figures = Figures { resident_idle: server.resident()?, ..Figures::default() };
    load::run(&server.endpoint, &mut figures).await?;
    figures.resident = server.resident()?;
    drop(server);
    figures.ready = first;
    Ok(figures)
}

async fn measure_kube(binaries: &Path) -> Outcome<Figures> {
    let directory = tempfile::tempdir()?;
    let server = Kube::start(directory.path(), binaries).await?;
    let (resident_idle, etcd_idle) = server.resident()?;
    let mut figures = Figures { ready: server.ready, resident_idle, etcd_idle, ..Figures::default() };
    load::run(&server.endpoint, &mut figures).await?;
    (figures.resident, figures.etcd) = server.resident()?;
    Ok(figures)
}

/// Fills a store with claims and volumes, and starts a server on it.
async fn measure_many(objects: usize) -> Outcome<table::Many> {
    let directory = tempfile::tempdir()?;
    let server = Berth::start(directory.path()).await?;
    let rate = load::fill(&server.endpoint, objects).await?;
    let filled = server.resident()?;
    drop(server);
    let server = Berth::start(directory.path()).await?;
    let listed = load::count(&server.endpoint).await?;
    Ok(table::Many { objects, listed, rate, filled, restart: server.ready, restarted: server.resident()? })
}
