//! Whether a cluster knows the kinds at all: they are not built in, and watching what is not there is only noise.

use std::time::Duration;

use berth_kube::Cluster;

/// The kinds of a group that a component needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kinds {
    /// The API group.
    pub(crate) group: &'static str,
    /// The plural names.
    pub(crate) plurals: &'static [&'static str],
}

/// Snapshots of single claims.
pub(crate) const SNAPSHOTS: Kinds = Kinds {
    group: super::names::GROUP,
    plurals: &["volumesnapshots", "volumesnapshotcontents", "volumesnapshotclasses"],
};

/// Groups of them.
pub(crate) const GROUPS: Kinds = Kinds {
    group: super::names::GROUPS_GROUP,
    plurals: &["volumegroupsnapshots", "volumegroupsnapshotcontents", "volumegroupsnapshotclasses"],
};

/// Waits until the cluster serves the kinds, looking again after each `pause`; false when the shutdown came first.
pub(crate) async fn wait(cluster: &Cluster, kinds: Kinds, component: &str, pause: Duration) -> bool {
    let mut told = false;
    while !are(cluster, kinds).await {
        if !told {
            tracing::info!(
                component,
                "this cluster has no {} of {}/v1; {component} waits until they are installed, looking every {pause:?}",
                kinds.plurals.join(", "),
                kinds.group
            );
            told = true;
        }
        tokio::select! {
            () = cluster.shutdown().cancelled() => return false,
            () = tokio::time::sleep(pause) => {}
        }
    }
    !cluster.shutdown().is_cancelled()
}

async fn are(cluster: &Cluster, kinds: Kinds) -> bool {
    match cluster.client().list_api_group_resources(&format!("{}/v1", kinds.group)).await {
        Ok(list) => {
            kinds.plurals.iter().all(|plural| list.resources.iter().any(|resource| resource.name == **plural))
        }
        Err(error) => {
            tracing::debug!(group = kinds.group, %error, "the kinds of a group could not be listed");
            false
        }
    }
}
