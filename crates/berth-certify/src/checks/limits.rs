//! Names as long and as strange as the specification allows.

use berth_csi::{ControllerCapability as Controller, v1};

use super::{Need, checks};
use crate::session::{Expected as _, Outcome, Session, ensure};

const CREATE: Need = Need::Controller(Controller::CreateDeleteVolume);

checks! {
    "limits.long-name" Must "Size Limits": "A name of 128 bytes works.";
        "Do not use the name as the name of a file or of an object of the storage system: hash it if it is too long."; [CREATE] long_name;
    "limits.long-names-differ" Must "CreateVolume": "Two long names that differ in their last letter are two volumes.";
        "Do not cut names off; hash what does not fit."; [CREATE] long_names_differ;
    "limits.any-letters" Should "CreateVolume": "A name may hold any letters, spaces and dots.";
        "Only control characters are forbidden; encode what the storage system does not take."; [CREATE] any_letters;
    "limits.long-snapshot-name" Must "Size Limits": "A snapshot's name of 128 bytes works.";
        "Hash names that are too long for the storage system."; [CREATE, Need::Controller(Controller::CreateDeleteSnapshot)] long_snapshot_name;
}

fn long(session: &Session, last: char) -> String {
    let name = session.name("long");
    format!("{name}{}{last}", "x".repeat(127 - name.len()))
}

async fn long_name(session: &Session) -> Outcome {
    // A driver that can create no volume fails elsewhere.
    session.volume().await?;
    let request = v1::CreateVolumeRequest { name: long(session, 'a'), ..session.create_request() };
    session.call(request).await.or_broken("CreateVolume with a name of 128 bytes").map(drop)
}

async fn long_names_differ(session: &Session) -> Outcome {
    let name = long(session, 'a');
    let other = format!("{}b", &name[..127]);
    let first = session.volume_from(v1::CreateVolumeRequest { name, ..session.create_request() }).await?;
    let second =
        session.volume_from(v1::CreateVolumeRequest { name: other, ..session.create_request() }).await?;
    ensure(first.volume_id != second.volume_id, || {
        format!("two names of 128 bytes gave the same volume {:?}", first.volume_id)
    })
}

async fn any_letters(session: &Session) -> Outcome {
    session.volume().await?;
    let name = format!("{} Größe/卷 .. 1%", session.name("letters"));
    let request = v1::CreateVolumeRequest { name, ..session.create_request() };
    session.call(request).await.or_broken("CreateVolume with letters beyond ASCII").map(drop)
}

async fn long_snapshot_name(session: &Session) -> Outcome {
    let volume = session.volume().await?;
    session.snapshot(&volume).await?;
    let request = v1::CreateSnapshotRequest { name: long(session, 's'), ..session.snapshot_request(&volume) };
    session.call(request).await.or_broken("CreateSnapshot with a name of 128 bytes").map(drop)
}
