//! `berth apiserver`: the embedded Kubernetes API on a loopback address, for kubectl and for controllers.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, bail};
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
    empty_store: EmptyStore,

    #[command(flatten)]
    logging: logging::Logging,
}

/// What to do when the objects are gone.
#[derive(Debug, Clone, Copy, Default, ClapArgs)]
pub(crate) struct EmptyStore {
    /// Start with no objects although certificates or drivers' records prove that there was a cluster here
    #[arg(long)]
    accept_empty_store: bool,
}

/// Opens the store in `directory`, whose parent holds the certificates.
///
/// An empty store is a new one, or one that was lost. If certificates, or drivers' records, prove that there was a cluster, this
/// fails unless that is accepted: with no objects, pods would be killed and volumes forgotten.
pub(crate) async fn open_store(
    directory: &Path,
    has_driver_records: bool,
    empty_store: EmptyStore,
) -> anyhow::Result<(Store, store::Opened)> {
    let has_certificates = directory.join("pki/ca.crt").exists();
    let (store, opened) = Store::open(&directory.join("store"), store::Options::default())
        .with_context(|| format!("open {}", directory.display()))?;
    if opened.damaged > 0 {
        tracing::error!(opened.damaged, "records were damaged and set aside; all others are served");
    }
    if opened.objects > 0 {
        return Ok((store, opened));
    }
    let proof = match (has_certificates, has_driver_records) {
        (_, true) => "drivers have volumes",
        (true, false) => "there are certificates",
        (false, false) => "",
    };
    if !proof.is_empty() && !empty_store.accept_empty_store {
        bail!(
            "the API server's objects in {} are gone, though {proof}. Restore a backup: berth restore FILE. Or start with no \
             objects: --accept-empty-store; pods that run are then stopped, and `berth adopt` makes PersistentVolumes for the \
             volumes that are left",
            directory.join("store").display()
        );
    }
    // There are objects before there are certificates, so that a first start that is killed proves nothing.
    let first = ApiServer::new(store.clone(), Options::default()).bootstrap().await;
    first.map_err(|failure| anyhow::anyhow!("prepare the API: {failure:?}"))?;
    Ok((store, opened))
}

/// Serves until SIGTERM or SIGINT.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    logging::start(&args.logging);
    let directory = &args.data_dir;
    let (store, opened) = open_store(directory, false, args.empty_store).await?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_store_that_was_lost_is_not_taken_for_a_new_one() {
        let directory = tempfile::tempdir().unwrap();
        let accepted = EmptyStore { accept_empty_store: true };
        let open = |records, empty| open_store(directory.path(), records, empty);
        // A first start that ends before there are certificates, and a second one.
        let (store, opened) = open(false, EmptyStore::default()).await.unwrap();
        assert_eq!((opened.objects, store.get(&namespace()).is_some()), (0, true));
        drop(store);
        Credentials::ensure(&directory.path().join("pki"), jiff::Timestamp::now()).unwrap();
        assert!(open(true, EmptyStore::default()).await.unwrap().1.objects > 0);
        let objects = directory.path().join("store").join(store::JOURNAL);
        for how in ["removed", "truncated", "directory"] {
            match how {
                "removed" => std::fs::remove_file(&objects).unwrap(),
                "truncated" => std::fs::write(&objects, "").unwrap(),
                _ => std::fs::remove_dir_all(directory.path().join("store")).unwrap(),
            }
            let refused = open(false, EmptyStore::default()).await.unwrap_err().to_string();
            assert!(
                refused.contains("berth restore") && refused.contains("--accept-empty-store"),
                "{how}: {refused}"
            );
            assert!(open(false, EmptyStore::default()).await.is_err(), "{how}: again");
            let (store, _) = open(false, accepted).await.unwrap();
            assert!(store.get(&namespace()).is_some(), "{how}");
        }
        let other = tempfile::tempdir().unwrap();
        assert!(open_store(other.path(), true, EmptyStore::default()).await.is_err(), "drivers have volumes");
    }

    fn namespace() -> store::Key {
        store::Key::new("namespaces".into(), "", "default")
    }
}
