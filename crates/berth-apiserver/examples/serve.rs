//! Serves the Kubernetes API from a data directory: `serve DIRECTORY [PORT]` prints where the kubeconfig lies.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use berth_apiserver::auth::Credentials;
use berth_apiserver::collect;
use berth_apiserver::rest::{ApiServer, Options};
use berth_apiserver::server::Server;
use berth_apiserver::store::{self, Store};
use tokio_util::sync::CancellationToken;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().ok_or("usage: serve DIRECTORY [PORT]")?);
    let port = arguments.next().map_or(Ok(0), |port| port.parse())?;
    let (store, opened) = Store::open(&directory.join("store"), store::Options::default())?;
    let credentials = Arc::new(Credentials::ensure(&directory.join("pki"), jiff::Timestamp::now())?);
    let shutdown = CancellationToken::new();
    let options =
        Options { credentials: Some(credentials.clone()), shutdown: shutdown.clone(), ..Options::default() };
    let api = ApiServer::new(store, options);
    api.bootstrap().await?;
    tokio::spawn(collect::run(api.clone(), collect::Options::default(), shutdown.clone()));
    let kubeconfig = directory.join("kubeconfig");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let server = Server::bind(address, api, credentials, Some(kubeconfig.clone())).await?;
    println!("{} objects; https://{}; {}", opened.objects, server.address(), kubeconfig.display());
    let interrupted = shutdown.clone();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        interrupted.cancel();
    });
    server.run(shutdown).await;
    Ok(())
}
