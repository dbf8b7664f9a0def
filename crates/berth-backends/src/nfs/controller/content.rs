//! The content of volumes that are images, from the controller's side: a sparse file in the volume's directory.
//!
//! It is made, copied and grown by the user-space client; what is in it is the node's to make (`worker.rs`).

use std::future::Future;

use berth_nfs::{Attributes, Change, Create, Entry, Handle, Share};

use super::{
    claims::{refuse_written, while_copying},
    record::names_in,
    shares::{failed, found},
};
use crate::{Error, Result, image::IMAGE};

/// Beside an image that is a copy of another and has not been used since.
pub(in crate::nfs) const COPIED: &str = "copied";

/// Makes a blank image in an empty directory.
pub(super) async fn make_blank(share: &Share, dir: &Handle, size: u64) -> Result<()> {
    let change = Change { size: Some(size), ..Change::mode(0o600) };
    let made = share.create(dir, IMAGE, Create::New, &change).await.map_err(failed)?;
    // What is asked for at creation is advice to some servers.
    resize(share, &made, size).await
}

/// Makes a copied directory the image's own, and the image at least `size` long; gives its length.
pub(super) async fn adopt_copy(share: &Share, dir: &Handle, size: u64) -> Result<u64> {
    let image = find(share, dir).await?;
    for name in names_in(share, dir).await?.iter().filter(|name| *name != IMAGE) {
        share.remove_tree(dir, name).await.map_err(failed)?;
    }
    share.create(dir, COPIED, Create::Truncate, &Change::mode(0o600)).await.map_err(failed)?;
    ensure_size(share, &image, size).await
}

/// Makes an image at least `size` long; gives its length.
pub(super) async fn ensure_size(share: &Share, image: &Entry, size: u64) -> Result<u64> {
    if image.attributes.size < size {
        resize(share, image, size).await?;
    }
    Ok(size.max(image.attributes.size))
}

async fn resize(share: &Share, image: &Entry, size: u64) -> Result<()> {
    let change = Change { size: Some(size), ..Change::default() };
    let now = if image.attributes.size == size {
        image.attributes.clone()
    } else {
        share.set_attributes(&image.handle, &change).await.map_err(failed)?
    };
    if now.size == size {
        return Ok(());
    }
    Err(Error::State(format!("the server gave the image {} bytes instead of {size}", now.size)))
}

/// The image in a volume's directory.
pub(super) async fn find(share: &Share, dir: &Handle) -> Result<Entry> {
    found(share.lookup(dir, IMAGE).await)?.ok_or_else(|| {
        Error::Precondition(format!(
            "the volume's image is gone: there is no file {IMAGE:?} in its directory"
        ))
    })
}

/// Copies the image in `dir`, which is refused before and after if the image is in use: nothing torn is made of it.
/// `whose` is the key of what the copy is for.
pub(super) async fn copy_at_rest<T>(
    share: &Share,
    dir: &Handle,
    whose: &str,
    doing: &str,
    copy: impl Future<Output = Result<T>>,
) -> Result<T> {
    while_copying(share, dir, whose, doing, async {
        let before = at_rest(share, dir, doing).await?;
        let copied = copy.await?;
        let after = at_rest(share, dir, doing).await?;
        let identity = |image: &Attributes| (image.fileid, image.size, image.modified);
        if identity(&after) == identity(&before) {
            return Ok(copied);
        }
        Err(Error::Busy(format!("the image was used meanwhile; {doing} is to be tried again")))
    })
    .await
}

/// The image in `dir`, unless somebody writes it.
pub(super) async fn at_rest(share: &Share, dir: &Handle, doing: &str) -> Result<Attributes> {
    refuse_written(share, dir, doing).await?;
    Ok(find(share, dir).await?.attributes)
}
