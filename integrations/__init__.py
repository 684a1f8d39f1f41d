"""Other frameworks' extension points, one file each; none exists yet."""
