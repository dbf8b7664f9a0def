//! Finds and pulls images by the runtime.

use async_trait::async_trait;

use super::{
    Cri, LOOK_UP,
    calls::{answer, refused},
    v1::{self, image_service_client::ImageServiceClient},
};
use crate::{Credentials, Image, Images, Result};

#[async_trait]
impl Images for Cri {
    async fn find(&self, name: &str) -> Result<Option<Image>> {
        let image = v1::ImageSpec { image: name.to_owned(), ..Default::default() };
        let request = v1::ImageStatusRequest { image: Some(image), verbose: false };
        let mut client = ImageServiceClient::new(self.0.channel.clone());
        let found = answer("look for an image", LOOK_UP, client.image_status(request)).await?.image;
        Ok(found.map(|image| Image {
            id: image.id,
            user: image.uid.and_then(|user| user.value.try_into().ok()),
            user_name: Some(image.username).filter(|name| !name.is_empty()),
            size: image.size,
        }))
    }

    async fn pull(&self, name: &str, credentials: &[Credentials]) -> Result<Image> {
        let with = credentials.iter().map(|own| {
            Some(v1::AuthConfig {
                username: own.user.clone(),
                password: own.password.clone(),
                ..Default::default()
            })
        });
        let with: Vec<_> = if credentials.is_empty() { vec![None] } else { with.collect() };
        let doing = "pull the image";
        let mut problem = None;
        for auth in with {
            let image = v1::ImageSpec { image: name.to_owned(), ..Default::default() };
            let request = v1::PullImageRequest { image: Some(image), auth, sandbox_config: None };
            // However long a large image takes.
            match ImageServiceClient::new(self.0.channel.clone()).pull_image(request).await {
                Ok(_) => {
                    let found = self.find(name).await?;
                    let gone = || refused(doing, "it was removed again".to_owned());
                    return found.ok_or_else(gone);
                }
                Err(status) => problem = Some(refused(doing, status.message().to_owned())),
            }
        }
        Err(problem.unwrap_or_else(|| refused(doing, "nobody tried".to_owned())))
    }
}
