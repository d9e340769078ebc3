"""Files and folders as they lie on the disk: links, records, folders not finished yet, and removing what is ours."""
