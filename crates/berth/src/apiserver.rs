//! `berth apiserver`: the embedded Kubernetes API on a loopback address, for kubectl and for controllers.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use anyhow::Context as _;
use berth_apiserver::{
    auth::Credentials,
    collect,
    rest::{ApiServer, Options},
    server::Server,
    store::{self, Store},
};
use clap::Args as ClapArgs;

use crate::launch::stop_on_signal;
use crate::logging;

/// The Kubernetes API for the kinds that storage needs, kept in one directory.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Where objects, certificates and the kubeconfig are kept
    #[arg(long, default_value = "/var/lib/berth/apiserver", value_name = "DIR")]
    data_dir: PathBuf,

    /// Where to listen; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:6443", value_name = "ADDRESS")]
    listen: SocketAddr,

    /// Where to write the kubeconfig [default: kubeconfig in the data directory]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    #[command(flatten)]
    logging: logging::Logging,
}

/// Serves until SIGTERM or SIGINT.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    logging::start(&args.logging);
    let directory = &args.data_dir;
    let (store, opened) = Store::open(&directory.join("store"), store::Options::default())
        .with_context(|| format!("open {}", directory.display()))?;
    if opened.damaged > 0 {
        tracing::error!(opened.damaged, "records were damaged and set aside; all others are served");
    }
    let credentials = Arc::new(Credentials::ensure(&directory.join("pki"), jiff::Timestamp::now())?);
    let shutdown = stop_on_signal()?;
    let options =
        Options { credentials: Some(credentials.clone()), shutdown: shutdown.clone(), ..Options::default() };
    let api = ApiServer::new(store, options);
    api.bootstrap().await.map_err(|failure| anyhow::anyhow!("prepare the API: {failure:?}"))?;
    let kubeconfig = args.kubeconfig.clone().unwrap_or_else(|| directory.join("kubeconfig"));
    let server = Server::bind(args.listen, api.clone(), credentials, Some(kubeconfig.clone())).await?;
    tracing::info!(
        address = %server.address(),
        objects = opened.objects,
        "ready: kubectl --kubeconfig {}", kubeconfig.display()
    );
    let collecting = tokio::spawn(collect::run(api, collect::Options::default(), shutdown.clone()));
    server.run(shutdown).await;
    collecting.await.context("the collector ended badly")
}
