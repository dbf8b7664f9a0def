//! Whether a cluster has the snapshot CRDs at all: they are not built in, and watching what is not there is only noise.

use std::time::Duration;

use berth_kube::Cluster;

/// The custom resources of one API group that a component needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CrdSet {
    /// The API group that serves them.
    pub(crate) group: &'static str,
    /// The plural names of the resources.
    pub(crate) plurals: &'static [&'static str],
}

/// Snapshots of single claims.
pub(crate) const SNAPSHOTS: CrdSet = CrdSet {
    group: super::names::GROUP,
    plurals: &["volumesnapshots", "volumesnapshotcontents", "volumesnapshotclasses"],
};

/// Snapshots of groups of claims.
pub(crate) const GROUPS: CrdSet = CrdSet {
    group: super::names::GROUPS_GROUP,
    plurals: &["volumegroupsnapshots", "volumegroupsnapshotcontents", "volumegroupsnapshotclasses"],
};

/// Waits until the cluster serves the CustomResourceDefinitions, asking again after each `pause`; false when the shutdown came first.
pub(crate) async fn wait(cluster: &Cluster, crds: CrdSet, component: &str, pause: Duration) -> bool {
    let mut logged = false;
    while !are(cluster, crds).await {
        if !logged {
            tracing::info!(
                component,
                "this cluster has no {} of {}/v1; {component} waits until they are installed, asking every {pause:?}",
                crds.plurals.join(", "),
                crds.group
            );
            logged = true;
        }
        tokio::select! {
            () = cluster.shutdown().cancelled() => return false,
            () = tokio::time::sleep(pause) => {}
        }
    }
    !cluster.shutdown().is_cancelled()
}

async fn are(cluster: &Cluster, crds: CrdSet) -> bool {
    match cluster.client().list_api_group_resources(&format!("{}/v1", crds.group)).await {
        Ok(list) => {
            crds.plurals.iter().all(|plural| list.resources.iter().any(|resource| resource.name == **plural))
        }
        Err(error) => {
            tracing::debug!(group = crds.group, %error, "the kinds of a group could not be listed");
            false
        }
    }
}
