//! Who uses an image: a file beside it for each node that does, so that no two kernels ever write one filesystem. A
//! [`Claim`] here is such a file, not a PersistentVolumeClaim.
//!
//! Kubernetes does not keep a volume that is not attached from being used on two nodes at once, ReadWriteOnce or not. So
//! a node says first that it is going to use an image, and then reads who else does: of two that come at the same time
//! at least one sees the other. What a node has said stays until it has really let go, also when it is refused the image
//! later: its kernel may still write what an earlier pod had. A node that is gone for good has to be unsaid by a person, who
//! alone can know that it is.
//!
//! Who copies an image ([`Copying`]) says so beside it as well, and nodes do not begin to write it meanwhile: the copy would
//! have to be thrown away, and could not be made as long as the pod runs. That somebody who died may be copying is
//! forgotten after a while, so a copy that takes longer is still to be checked when it is done. So is one of an image beside
//! which nothing can be written, because the share is full for instance: it is made all the same.

use std::{future::Future, time::Duration};

use berth_nfs::{Handle, Share};
use serde::{Deserialize, Serialize};

use super::{
    record::{self, key_of, keys_among, names_in, written_in},
    shares::found,
};
use crate::{Error, Result};

const PREFIX: &str = ".used-by-";
const COPY_PREFIX: &str = ".copied-by-";
/// How many seconds a node waits for a copy. After that the pod goes first, and the copy is made when the image is at rest again.
const COPY: i64 = 300;
/// A pod that has just been deleted leaves its image a little later, and the next must not be quicker than who waits to copy.
const LEAVING: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// A node's use of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    /// The id of the node that has the image.
    pub(super) node: String,
    /// Where it has the image: two places of one node would be as bad as two nodes.
    pub(super) place: String,
    pub(super) read_only: bool,
    /// In seconds since 1970.
    pub(super) since: u64,
}

impl Claim {
    fn key(&self) -> String {
        format!("{PREFIX}{}", key_of(&format!("{}\0{}", self.node, self.place)))
    }

    /// Says that the image in `dir` is used, unless somebody else's use forbids it: then what the node has said before is there
    /// unchanged. Where it has said more than it says now, that stays until [`Claim::note_mounted`].
    pub(super) async fn take(&self, share: &Share, dir: &Handle) -> Result<()> {
        let before: Option<Self> = record::read_in(share, dir, &self.key()).await?;
        let read_only = self.read_only && before.as_ref().is_none_or(|before| before.read_only);
        match record::write_in(share, dir, &self.key(), &Self { read_only, ..self.clone() }).await {
            // Through a share that cannot be written nobody writes.
            Err(Error::Precondition(_)) if self.read_only => return Ok(()),
            written => written?,
        }
        let checked = self.check_others(share, dir).await;
        if checked.is_err() {
            let restored = match before {
                Some(before) => record::write_in(share, dir, &self.key(), &before).await,
                None => self.give_back(share, dir).await,
            };
            // It then says more than it has to, until the image is released.
            if let Err(error) = restored {
                tracing::warn!(%error, "the claim on an image that was refused stays for now");
            }
        }
        checked
    }

    /// Says that the image is only read, once it is mounted so: the kernel has let go of it for writing then.
    pub(super) async fn note_mounted(&self, share: &Share, dir: &Handle) -> Result<()> {
        let said: Option<Self> = record::read_in(share, dir, &self.key()).await?;
        if self.read_only && said.is_some_and(|said| !said.read_only) {
            record::write_in(share, dir, &self.key(), self).await?;
        }
        Ok(())
    }

    /// Refuses the image if somebody else's use forbids this one.
    async fn check_others(&self, share: &Share, dir: &Handle) -> Result<()> {
        let others = claims(share, dir, &self.key()).await?;
        let in_the_way = others.into_iter().find(|other| !self.read_only || !other.1.read_only);
        let refusal = if let Some((key, other)) = in_the_way {
            format!(
                "the image is in use {} and belongs to one node at a time; if that node is gone for good, remove the \
                 file {key}.json from the volume's directory on the share",
                other.shown()
            )
        } else if !self.read_only
            && let Some(copying) = copy_under_way(share, dir, &self.key()).await?
        {
            format!("the image is being copied for {}, and can be written when that is done", copying.doing)
        } else {
            return Ok(());
        };
        Err(Error::Precondition(refusal))
    }

    /// Says that the image is no longer used.
    pub(super) async fn give_back(&self, share: &Share, dir: &Handle) -> Result<()> {
        match record::remove_in(share, dir, &self.key()).await {
            Err(Error::Precondition(_)) if self.read_only => Ok(()),
            removed => removed,
        }
    }

    fn shown(&self) -> String {
        let how = if self.read_only { "for reading " } else { "" };
        format!("{how}on node {:?}", self.node)
    }
}

/// That an image is being copied, in a file beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Copying {
    doing: String,
}

/// The file that holds [`Copying`]. It is also removed when this is dropped, since a copy that nobody wants any more is stopped
/// before its end.
struct CopyNote {
    share: Share,
    dir: Handle,
    key: String,
    is_removed: bool,
}

impl CopyNote {
    /// Writes it. Where the server lets nobody write it, nodes may begin to write the image, and the copy is found to be torn.
    async fn write(share: &Share, dir: &Handle, whose: &str, doing: &str) -> Result<Self> {
        let key = format!("{COPY_PREFIX}{whose}");
        // Before the request, which the server may do after somebody has stopped to wait for it.
        let note = Self { share: share.clone(), dir: dir.clone(), key, is_removed: false };
        match record::write_in(share, dir, &note.key, &Copying { doing: doing.to_owned() }).await {
            Err(error @ (Error::Precondition(_) | Error::Exhausted(_) | Error::Denied(_))) => {
                tracing::info!(%error, "nodes do not know that an image is being copied");
                Ok(note)
            }
            written => written.map(|()| note),
        }
    }

    async fn remove(mut self) {
        remove_copy_note(&self.share, &self.dir, &self.key).await;
        self.is_removed = true;
    }
}

impl Drop for CopyNote {
    fn drop(&mut self) {
        if self.is_removed {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let (share, dir, key) = (self.share.clone(), self.dir.clone(), std::mem::take(&mut self.key));
            runtime.spawn(async move { remove_copy_note(&share, &dir, &key).await });
        }
    }
}

async fn remove_copy_note(share: &Share, dir: &Handle, key: &str) {
    // One that stays is forgotten.
    if let Err(error) = record::remove_in(share, dir, key).await {
        tracing::debug!(%error, "a note that an image is being copied stays");
    }
}

/// Lets somebody copy the image in `dir` while no node begins to write it; `whose` is the key of what the copy is for.
pub(super) async fn while_copying<T>(
    share: &Share,
    dir: &Handle,
    whose: &str,
    doing: &str,
    copy: impl Future<Output = Result<T>>,
) -> Result<T> {
    let note = CopyNote::write(share, dir, whose, doing).await?;
    let copied = async {
        let leaving = tokio::time::Instant::now() + LEAVING;
        loop {
            match refuse_written(share, dir, doing).await {
                Err(Error::Precondition(_)) if tokio::time::Instant::now() < leaving => {
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
                checked => break checked?,
            }
        }
        copy.await
    };
    let copied = copied.await;
    note.remove().await;
    copied
}

/// Who copies the image in `dir`; who seems to do so for too long is forgotten. `own` is the claim that asks.
async fn copy_under_way(share: &Share, dir: &Handle, own: &str) -> Result<Option<Copying>> {
    let mut keys = keys_among(names_in(share, dir).await?);
    keys.retain(|key| key.starts_with(COPY_PREFIX));
    for key in keys {
        // By the server's clock, which has just dated the claim.
        let (now, since) = (written_in(share, dir, own).await?, written_in(share, dir, &key).await?);
        let Some(since) = since else { continue };
        if now.is_some_and(|now| now - since >= COPY) {
            record::remove_in(share, dir, &key).await?;
            continue;
        }
        let copying = record::read_in(share, dir, &key).await?;
        return Ok(Some(copying.unwrap_or_else(|| Copying { doing: "somebody".to_owned() })));
    }
    Ok(None)
}

/// Refuses to do something to an image that somebody writes.
pub(super) async fn refuse_written(share: &Share, dir: &Handle, doing: &str) -> Result<()> {
    let writer = claims(share, dir, "").await?.into_iter().find(|(_, claim)| !claim.read_only);
    match writer {
        None => Ok(()),
        Some((_, claim)) => Err(Error::Precondition(format!(
            "{doing} needs the image at rest, and it is in use {}: stop the pods that use the volume",
            claim.shown()
        ))),
    }
}

/// All claims but one, with their keys.
async fn claims(share: &Share, dir: &Handle, but: &str) -> Result<Vec<(String, Claim)>> {
    let mut claims = Vec::new();
    for key in keys_among(names_in(share, dir).await?) {
        if !key.starts_with(PREFIX) || key == but {
            continue;
        }
        if let Some(claim) = record::read_in(share, dir, &key).await? {
            claims.push((key, claim));
        } else if found(share.lookup(dir, format!("{key}.json")).await)?.is_some() {
            // Being written, or damaged: the worst is assumed.
            let unknown = Claim { node: "unknown".into(), place: String::new(), read_only: false, since: 0 };
            claims.push((key, unknown));
        }
    }
    Ok(claims)
}

#[cfg(test)]
mod tests;
