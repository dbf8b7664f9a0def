//! csi-sanity against the whole NFS driver: every spec, and only those skipped that ask for what NFS cannot have.

#[path = "../../../testbed/nfs/cannot.rs"]
mod cannot;

use std::{fs, io::Write as _};

use anyhow::{Result, ensure};
use berth_e2e::sanity;

use self::cannot::CANNOT;
use crate::world::{Part, Server};

async fn conforms(server: Server, by: &str) -> Result<()> {
    let (controller, node) = (server.drive(Part::Controller).await?, server.drive(Part::Node).await?);
    let dir = server.dir();
    let yaml: Vec<String> =
        server.parameters().iter().map(|(key, value)| format!("{key}: {value:?}")).collect();
    fs::write(dir.join("parameters.yaml"), yaml.join("\n"))?;
    let args = [
        format!("--csi.endpoint={}", server.endpoint(Part::Node)),
        format!("--csi.controllerendpoint={}", server.endpoint(Part::Controller)),
        format!("--csi.mountdir={}", dir.join("mount").display()),
        format!("--csi.stagingdir={}", dir.join("staging").display()),
        format!("--csi.testvolumeparameters={}", dir.join("parameters.yaml").display()),
        "--csi.testvolumesize=1073741824".to_owned(),
        "--csi.testvolumeexpandsize=1610612736".to_owned(),
    ];
    let home = dir.clone();
    let outcome = tokio::task::spawn_blocking(move || sanity::run(&home, &args)).await??;
    writeln!(std::io::stderr(), "csi-sanity, NFS {by}: {outcome}; skipped: {:#?}", outcome.skipped)?;
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{}", outcome.failures.join("\n"));
    let unexpected: Vec<_> = outcome
        .skipped
        .iter()
        .filter(|name| !CANNOT.iter().any(|capability| name.contains(capability)))
        .collect();
    ensure!(unexpected.is_empty(), "skipped: {unexpected:#?}");
    ensure!(outcome.count("passed") + outcome.count("skipped") == sanity::SPECS, "{outcome}");
    server.nothing_left().await?;
    let left: Vec<_> = fs::read_dir(server.export())?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .filter(|name| name != ".berth")
        .collect();
    ensure!(left.is_empty(), "the suite deletes what it makes: {left:?}");
    node.stop().await?;
    controller.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_conforms_by_version_3() -> Result<()> {
    conforms(Server::start("3")?, "3").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_conforms_by_version_4() -> Result<()> {
    conforms(Server::start("4.1")?, "4.1").await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_conforms_on_the_server_of_berth() -> Result<()> {
    conforms(Server::start_own()?, "3 of berth nfs serve").await
}
