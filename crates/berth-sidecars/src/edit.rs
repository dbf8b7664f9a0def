//! A change of an object as it is now, made again if somebody else was quicker.

use std::sync::Arc;

use berth_kube::{Cluster, Key, Kind};
use kube::ResourceExt as _;

use crate::failure::Failure;

/// How often a change is tried again at once when somebody else was quicker.
const TRIES: u32 = 5;

/// Changes metadata or spec; `None` if the object is gone, or another one of its name is there.
pub(crate) async fn object<K: Kind>(
    cluster: &Cluster,
    object: &Arc<K>,
    change: impl Fn(&mut K),
) -> Result<Option<Arc<K>>, Failure> {
    edit(cluster, object, change, false).await
}

/// Changes the status; `None` if the object is gone, or another one of its name is there.
pub(crate) async fn status<K: Kind>(
    cluster: &Cluster,
    object: &Arc<K>,
    change: impl Fn(&mut K),
) -> Result<Option<Arc<K>>, Failure> {
    edit(cluster, object, change, true).await
}

async fn edit<K: Kind>(
    cluster: &Cluster,
    object: &Arc<K>,
    change: impl Fn(&mut K),
    status: bool,
) -> Result<Option<Arc<K>>, Failure> {
    let key = Key::of(object.as_ref());
    let mut current = object.clone();
    for _ in 0..TRIES {
        let written = if status {
            cluster.update_status(current.as_ref(), &change).await
        } else {
            cluster.update(current.as_ref(), &change).await
        };
        match written {
            Ok(written) => return Ok(Some(written)),
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) if error.is_conflict() => {
                let now = cluster.fetch::<K>(&key).await?.filter(|now| now.uid() == object.uid());
                let Some(now) = now else { return Ok(None) };
                current = now;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(Failure::refused(format!("{} {key} is changed all the time by somebody else", K::kind(&()))))
}
